"""The expression by which a body reaches a tensor or a generator that it was not given, for messages."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from types import CellType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

MAX_LOOKED = 20_000  # a bound on the search for a name, so that a body that reaches the whole program stays cheap
MORE = object()  # stands for what a search leaves out
ENDS = (int, float, complex, str, bytes, type(None))  # what leads nowhere, and is met often
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))


def find_name(body: Callable[..., Any], wanted: Tensor) -> str | None:
    """The expression by which the body reaches a tensor: `w`, `self.weight`, `net.conv1.weight`, `lists['a'][0]`."""
    return next((name for name, value in reachable(body) if value is wanted), None)


def reachable(
    body: Callable[..., Any], closed: tuple[type, ...] = (), most: int = MAX_LOOKED
) -> Iterator[tuple[str, Any]]:
    """What a body can reach without being given it, the nearest first, each with the expression that reaches it; not
    through what is of a `closed` type. After `most` steps the last one is `MORE`.
    """
    queue = deque([_callable_children("", body)])  # not yet read, so that no more is looked at than is asked for
    visited: set[int] = {id(body)}
    looked = 0
    while queue:
        for name, value in queue.popleft():
            looked += 1
            if looked > most:
                yield "", MORE
                return
            if id(value) in visited:
                continue
            visited.add(id(value))
            yield name, value
            if not isinstance(value, (closed, *ENDS)):
                queue.append(children(name, value))


def children(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What one can reach from a value in one step, with the expression that reaches it."""
    if isinstance(value, torch.nn.Module):
        yield from _module_children(name, value)
        return
    if isinstance(value, Mapping):
        yield from ((f"{name}[{k!r}]", v) for k, v in value.items())
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from ((f"{name}[{i}]", v) for i, v in enumerate(value))
    elif callable(value) and not isinstance(value, type):
        yield from _callable_children(name, value)
    if isinstance(value, type):
        yield from _class_children(name, value)
    elif not isinstance(value, (Tensor, ModuleType, FunctionType)):
        yield from _attributes(name, value)


def _module_children(name: str, module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """What a module has of its own, and the modules right below it; little else, as a large net is walked often."""
    for own in (module._parameters, module._buffers, module._modules):
        for k, v in own.items():
            yield f"{name}.{k}", v
    attributes = vars(module)
    for k in [k for k in attributes if k not in _OF_EVERY_MODULE]:
        yield f"{name}.{k}", attributes[k]
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        if hooks:
            yield f"{name}'s hooks", hooks
    yield name, type(module)


def _attributes(name: str, obj: Any) -> Iterator[tuple[str, Any]]:
    """Attributes of an object itself, its slots, and its class, where more of them may be; runs no code of the user."""
    with suppress(AttributeError):
        yield from ((f"{name}.{k}", v) for k, v in object.__getattribute__(obj, "__dict__").items())
    for cls in type(obj).__mro__:
        if "__slots__" in vars(cls):
            for k in [k for k, v in vars(cls).items() if isinstance(v, MemberDescriptorType)]:
                with suppress(AttributeError):  # nothing is assigned to it yet
                    yield f"{name}.{k}", object.__getattribute__(obj, k)
    yield name, type(obj)


def _class_children(name: str, cls: type) -> Iterator[tuple[str, Any]]:
    """The data among a class's attributes."""
    if _is_of_a_library(cls.__module__):
        return
    for k, v in vars(cls).items():
        if not k.startswith("__") and not hasattr(type(v), "__get__"):
            yield f"{name}.{k}", v
    yield from ((name, base) for base in cls.__bases__)


def _callable_children(name: str, fn: Any) -> Iterator[tuple[str, Any]]:
    """Closure cells, defaults, globals, partial arguments, a bound self."""
    if isinstance(fn, functools.partial):
        yield from ((f"{name}partial argument {i}", v) for i, v in enumerate(fn.args))
        yield from ((k, v) for k, v in fn.keywords.items())
        yield (name, fn.func)
    elif isinstance(fn, MethodType):
        yield ("self", fn.__self__)
        yield (name, fn.__func__)
    elif isinstance(fn, FunctionType):
        yield from _function_children(fn)
    elif isinstance(fn, torch.nn.Module):
        yield from children(name or type(fn).__name__, fn)
    else:
        yield from _instance_children(name, fn)


def _instance_children(name: str, obj: Any) -> Iterator[tuple[str, Any]]:
    """A callable object: its attributes, what it wraps, and its `__call__`."""
    yield from _attributes(name or "self", obj)
    call = vars(type(obj)).get("__call__")
    if isinstance(call, FunctionType):
        yield from _function_children(call)


def _function_children(fn: FunctionType) -> Iterator[tuple[str, Any]]:
    for variable, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        if cell != CellType():  # an empty one belongs to a variable that is not assigned yet
            yield (variable, cell.cell_contents)
    names = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    yield from zip(reversed(names), reversed(fn.__defaults__ or ()), strict=False)
    yield from (fn.__kwdefaults__ or {}).items()
    if _is_of_a_library(fn.__globals__.get("__name__", "")):
        return
    mentioned = dict.fromkeys(_global_names(fn.__code__))  # attributes are among them
    for n in mentioned:
        if n in fn.__globals__:
            yield n, fn.__globals__[n]
            if isinstance(fn.__globals__[n], ModuleType):
                yield from _mentioned_in(n, fn.__globals__[n], mentioned)


def _mentioned_in(name: str, module: ModuleType, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """What a Python module holds under names that a function mentions."""
    if not _is_of_a_library(module.__name__):
        yield from ((f"{name}.{k}", vars(module)[k]) for k in names if k in vars(module))


def _is_of_a_library(module: str) -> bool:
    """Whether what stands in a Python module holds none of the user's tensors, and much else."""
    return module.partition(".")[0] in ("builtins", "torch", "pure_loopgrad")


def _global_names(code: CodeType) -> Iterator[str]:
    """Global names that a function or one nested in it mentions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)
