"""Many sets of parameters as one, for torch.func.vmap."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pure_loopgrad import _tree
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
