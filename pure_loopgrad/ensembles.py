"""Many sets of parameters as one, for torch.func.vmap."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pure_loopgrad import _tree
from pure_loopgrad._body import accumulation_dtype
from pure_loopgrad._tree import PyTree
from pure_loopgrad.errors import LoopValueError


def stack_params(members: Sequence[PyTree]) -> PyTree:
    """Stacks pytrees of parameters leaf by leaf, so that `torch.func.vmap` runs any function over an ensemble.

    Args:
        members: pytrees of one structure, with equal shapes and dtypes; leaves that are no tensor must be equal.

    Returns:
        The same structure, every tensor with a new first axis of length `len(members)`.

    Raises:
        LoopValueError: no members, or members that differ, with the leaf's path.

    Memory: a copy of all members.

    Example:
        >>> import torch, pure_loopgrad as plg
        >>> params = plg.stack_params([{"w": torch.tensor(1.0)}, {"w": torch.tensor(2.0)}])
        >>> loss = lambda p: plg.sum(lambda p, x: p["w"] * x, p, torch.arange(4.0))
        >>> torch.func.vmap(torch.func.grad(loss))(params)
        {'w': tensor([6., 6.])}
    """
    if not members:
        raise LoopValueError("there are no members to stack")
    split = [_tree.split(member) for member in members]
    tensors, first = split[0]
    for i, (others, skeleton) in enumerate(split):
        if (skeleton.spec, skeleton.static) != (first.spec, first.static):
            raise LoopValueError(f"member {i} has another structure than member 0, or leaves that are no tensor differ")
        for path, a, b in zip(first.tensor_paths("params"), tensors, others, strict=True):
            if (a.shape, a.dtype) != (b.shape, b.dtype):
                raise LoopValueError(f"{path} of member {i} has {_tree.describe(b)}, of member 0 {_tree.describe(a)}")
    return first.fill([torch.stack(leaves) for leaves in zip(*(t for t, _ in split), strict=True)])


def unstack_params(stacked: PyTree) -> list[PyTree]:
    """Takes an ensemble apart again; the inverse of `stack_params`.

    Args:
        stacked: a pytree whose tensors have one leading axis.

    Returns:
        A list of pytrees, whose tensors are views.

    Raises:
        LoopValueError: the leading axes disagree.

    Memory: none.

    Example:
        >>> import torch, pure_loopgrad as plg
        >>> plg.unstack_params({"w": torch.tensor([1.0, 2.0]), "name": "net"})
        [{'w': tensor(1.), 'name': 'net'}, {'w': tensor(2.), 'name': 'net'}]
    """
    tensors, skeleton = _tree.split(stacked)
    n = _tree.leading_axis(tensors, skeleton, "stacked")
    return [skeleton.fill([t[i] for t in tensors]) for i in range(n)]


def average_members(stacked: PyTree, weights: Sequence[float] | None = None) -> PyTree:
    """The average of an ensemble's members, in float32 for half precision.

    Args:
        stacked: a pytree whose tensors have one leading axis, as of `stack_params`.
        weights: one number a member; equal ones if None.

    Returns:
        The structure and dtypes of one member; leaves of integers and bools are those of the first.

    Raises:
        LoopValueError: another number of weights than members, or weights that add up to zero.

    Memory: one member.

    Example:
        >>> import torch, pure_loopgrad as plg
        >>> plg.average_members({"w": torch.tensor([1.0, 2.0, 6.0])})
        {'w': tensor(3.)}
    """
    tensors, skeleton = _tree.split(stacked)
    n = _tree.leading_axis(tensors, skeleton, "stacked")
    w = torch.ones(n, dtype=torch.float64) if weights is None else torch.as_tensor(weights, dtype=torch.float64)
    if w.shape != (n,) or w.sum() == 0:
        raise LoopValueError(f"weights {w.tolist()} for {n} members: expected one each, that do not add up to zero")
    return skeleton.fill([_averaged(t, w / w.sum()) for t in tensors])


def _averaged(t: Tensor, weights: Tensor) -> Tensor:
    if not _tree.is_differentiable(t):
        return t[0]
    wide = t.to(accumulation_dtype(t.dtype))
    mean: Tensor = torch.tensordot(weights.to(wide), wide, dims=1)
    return mean.to(t.dtype)
