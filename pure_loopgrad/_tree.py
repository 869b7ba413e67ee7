"""Pytrees by optree: tensors apart from everything else, the leading axis, paths for messages."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Protocol, TypeAlias

import optree
import torch
from torch import Tensor

from pure_loopgrad._nodes import NAMESPACE, children_of, register_dataclass, register_mapping, register_torch_node
from pure_loopgrad._template import Slot, Template
from pure_loopgrad.errors import LoopTypeError, LoopValueError

PyTree: TypeAlias = Any

# optree's stub for its type registry is private, so the treespec is typed by its public name
TreeSpec: TypeAlias = optree.PyTreeSpec
LEAF: TreeSpec = optree.treespec_leaf(namespace=NAMESPACE)  # of a tree that is one tensor


@dataclass(frozen=True, eq=False)
class Skeleton:
    """A pytree with its tensors taken out: the structure, and the leaves that are not tensors."""

    spec: TreeSpec
    static: tuple[Any, ...]  # one entry a leaf; `_HOLE` where a tensor goes

    @functools.cached_property
    def n_tensors(self) -> int:
        """How many leaves are tensors."""
        return sum(leaf is _HOLE for leaf in self.static)

    @functools.cached_property
    def template(self) -> Template:
        """The same in plain Python."""
        return Template(self.fill([Slot(i) for i in range(self.n_tensors)]), self.n_tensors)

    def fill(self, tensors: Sequence[Any]) -> PyTree:
        """Puts one value back where each tensor was."""
        if torch.compiler.is_dynamo_compiling():
            return self.template.fill(tensors)
        if self.n_tensors == len(self.static):  # as nearly always; this runs in every iteration
            return tensors[0] if self.spec.is_leaf() else self.spec.unflatten(tensors)
        values = iter(tensors)
        leaves = [next(values) if leaf is _HOLE else leaf for leaf in self.static]
        return self.spec.unflatten(leaves)

    def filling(self) -> Callable[[Sequence[Any]], PyTree]:
        """`fill`, with what it asks decided once."""
        if self.n_tensors != len(self.static):
            return self.fill
        return itemgetter(0) if self.spec.is_leaf() else self.spec.unflatten

    def fill_only(self, tensors: Sequence[Any]) -> PyTree:
        """Like `fill`, with None for every leaf that is not a tensor: the shape of a gradient."""
        values = iter(tensors)
        return self.spec.unflatten([next(values) if leaf is _HOLE else None for leaf in self.static])

    def tensor_paths(self, root: str) -> list[str]:
        """The path of each tensor leaf, as one would write it: `params['conv1']['weight']`."""
        accessors = self.spec.accessors()
        return [a.codify(root) for a, leaf in zip(accessors, self.static, strict=True) if leaf is _HOLE]

    @classmethod
    def of_tensors(cls, spec: TreeSpec) -> Skeleton:
        """The skeleton of a tree whose leaves are all tensors."""
        return cls(spec, (_HOLE,) * spec.num_leaves)


class _Hole:
    def __repr__(self) -> str:
        return "<tensor>"


_HOLE = _Hole()


def flatten(tree: PyTree) -> tuple[list[Any], TreeSpec]:
    """Flattens a pytree; a dataclass that is met for the first time becomes a node of its fields, and a class that is
    a node for torch one for us.
    """
    leaves, spec = optree.tree_flatten(tree, namespace=NAMESPACE)
    others = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
    unknown = {type(leaf): make for leaf in others if (make := _registration(leaf)) is not None}
    if not unknown:
        return leaves, spec
    for cls, make in unknown.items():
        make(cls)
    return flatten(tree)


def leaves_of(tree: PyTree) -> list[Any]:
    """The leaves of a pytree, whatever they are."""
    return flatten(tree)[0]


def tree_map(fn: Callable[..., Any], tree: PyTree, *others: PyTree) -> PyTree:
    """Applies a function to each leaf, and to the leaves of other trees in the same places."""
    found, spec = flatten(tree)
    columns = [found, *(spec.flatten_up_to(other) for other in others)]
    return spec.unflatten([fn(*row) for row in zip(*columns, strict=True)])


def split(tree: PyTree) -> tuple[list[Tensor], Skeleton]:
    """Takes the tensors out of a pytree, in the order of its leaves."""
    leaves, spec = flatten(tree)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    static = tuple(_HOLE if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return tensors, Skeleton(spec, static)


def split_like(prefix: PyTree, tree: PyTree, root: str) -> list[Any]:
    """One value of `prefix` for each tensor of `tree`: where it is a leaf, for all that stands below.

    Raises:
        LoopValueError: it is no upper part of the tree.
    """
    leaves, spec = flatten(tree)
    try:
        values = optree.broadcast_prefix(prefix, tree, namespace=NAMESPACE)
    except ValueError as error:
        raise LoopValueError(f"{root} is no upper part of the tree {spec}: {error}") from None
    return [value for value, leaf in zip(values, leaves, strict=True) if isinstance(leaf, Tensor)]


def is_differentiable(t: Tensor) -> bool:
    """Whether the dtype can carry a gradient."""
    return t.is_floating_point() or t.is_complex()


def leading_axis(tensors: Sequence[Tensor], skeleton: Skeleton, root: str = "xs") -> int:
    """The length n that all tensor leaves of `xs` share as their first axis.

    Raises:
        LoopValueError: there is no tensor, one has no axis, or two lengths disagree.
    """
    paths = skeleton.tensor_paths
    if not tensors:
        raise LoopValueError(
            f"{root} has no tensor leaf, so the number of iterations is not known; "
            f"pass {root}=torch.arange(n) for a loop over indices"
        )
    for i, t in enumerate(tensors):
        if t.dim() == 0:
            raise LoopValueError(
                f"{paths(root)[i]} is a scalar, but every tensor in {root} needs a leading axis "
                f"of one entry an iteration; what all iterations share belongs in params"
            )
    n = tensors[0].shape[0]
    for i, t in enumerate(tensors):
        if t.shape[0] != n:
            raise LoopValueError(
                f"the leading axes disagree: {paths(root)[0]} has {n} iterations (shape "
                f"{tuple(tensors[0].shape)}), {paths(root)[i]} has {t.shape[0]} (shape {tuple(t.shape)})"
            )
    return int(n)


def numbers_to_tensors(tree: PyTree, like: Sequence[Tensor], root: str) -> tuple[list[Tensor], TreeSpec]:
    """The leaves of a body's output as tensors; Python numbers are turned into one, as jax.lax does.

    Raises:
        LoopTypeError: a leaf is neither a tensor nor a number.
    """
    if isinstance(tree, Tensor):  # as nearly always; this runs in every iteration
        return [tree], LEAF
    leaves, spec = flatten(tree)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, (bool, int, float, complex)):
            leaves[i] = torch.tensor(leaf, device=like[0].device if like else None)
        elif not isinstance(leaf, Tensor):
            raise LoopTypeError(
                f"{spec.accessors()[i].codify(root)} is a {type(leaf).__name__}; a body returns a pytree of "
                f"tensors and numbers (or None). Return what is no tensor outside of the loop"
            )
    return leaves, spec


class HasShape(Protocol):
    """A tensor, or what stands for one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The lengths of the axes."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of the entries."""


def describe(t: HasShape) -> str:
    """Shape and dtype, for messages."""
    return f"shape {tuple(t.shape)} and dtype {t.dtype}"


def _registration(leaf: Any) -> Callable[[type], None] | None:
    """How the class of a leaf is made a node: a dataclass, or one that torch knows, with a tensor somewhere in it; one
    without (a config) stays a leaf.
    """
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        if not _holds_tensor([getattr(leaf, f.name) for f in dataclasses.fields(leaf)]):
            return None
        return register_mapping if isinstance(leaf, (dict, list, tuple)) else register_dataclass
    children = children_of(leaf)
    return register_torch_node if children and _holds_tensor(children) else None


def _holds_tensor(values: list[Any]) -> bool:
    return any(isinstance(v, Tensor) for v in flatten(values)[0])


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors among a torch function's arguments, which are nested in plain containers only."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from tensors_in(v)
    elif isinstance(value, dict):
        for v in value.values():
            yield from tensors_in(v)
