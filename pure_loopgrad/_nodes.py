"""Classes that become pytree nodes where they are met with a tensor inside: dataclasses, and nodes of torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, cast

import optree
from torch.utils import _pytree  # private, and the only way to ask; tests/test_private_torch.py says so if it moves

from pure_loopgrad.errors import LoopTypeError

NAMESPACE = "pure_loopgrad"  # other users of optree do not see what is registered here


def children_of(leaf: Any) -> list[Any]:
    """What torch finds inside; nothing, where it knows no node of this class."""
    node = _pytree.SUPPORTED_NODES.get(type(leaf))
    return [] if node is None else list(node.flatten_fn(leaf)[0])


def register_torch_node(cls: type) -> None:
    """Makes a class the node that it is for torch."""
    node = _pytree.SUPPORTED_NODES[cls]

    def take_apart(obj: Any) -> tuple[list[Any], Any]:
        children, context = node.flatten_fn(obj)
        return list(children), context

    def put_together(context: Any, children: Iterable[Any]) -> Any:
        return node.unflatten_fn(list(children), context)

    optree.register_pytree_node(cls, take_apart, put_together, namespace=NAMESPACE)


def register_dataclass(cls: type) -> None:
    """Makes a dataclass a pytree node in this library's own namespace."""
    names = tuple(f.name for f in dataclasses.fields(cls))

    def take_apart(obj: Any) -> tuple[tuple[Any, ...], None, tuple[str, ...]]:
        return tuple(getattr(obj, name) for name in names), None, names

    def put_together(_: Any, children: Any) -> Any:
        obj: Any = object.__new__(cls)  # not __init__: a __post_init__ may refuse None or do work twice
        for name, child in zip(names, children, strict=True):
            object.__setattr__(obj, name, child)
        return obj

    optree.register_pytree_node(cls, take_apart, put_together, path_entry_type=optree.GetAttrEntry, namespace=NAMESPACE)


def register_mapping(cls: type) -> None:
    """Makes a dataclass that is a dict as well a node of its items, which must be its fields: an output of
    transformers.
    """
    if not issubclass(cls, dict):
        raise LoopTypeError(f"{cls.__name__} is a dataclass and a sequence; use one that is a dataclass alone")
    names = tuple(f.name for f in dataclasses.fields(cast(Any, cls)))

    def take_apart(obj: Any) -> tuple[tuple[Any, ...], tuple[str, ...], tuple[str, ...]]:
        if any(getattr(obj, name) is not obj.get(name) for name in names):
            raise LoopTypeError(f"the fields of a {cls.__name__} are not its items; use a dict or a dataclass")
        return tuple(obj.values()), tuple(obj), tuple(obj)

    def put_together(keys: Any, children: Any) -> Any:
        obj: Any = cls.__new__(cls)
        for name in names:
            object.__setattr__(obj, name, None)
        for name, child in zip(keys, children, strict=True):
            super(cls, obj).__setitem__(name, child)
            object.__setattr__(obj, name, child)
        return obj

    optree.register_pytree_node(cls, take_apart, put_together, path_entry_type=optree.MappingEntry, namespace=NAMESPACE)
