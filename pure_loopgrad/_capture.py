"""Tensors that a body uses without being given them: they would get no gradient, so they are refused.

Two ways to need a gradient, two ways to be found. A tensor of an outer torch.func transform is wrapped, and is refused
where it is used. A plain tensor that requires grad shows in the graph of the outputs, as a leaf that is no input: that
has no false alarms, whatever path the value took, and the tensors seen on the way give the names.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pure_loopgrad import _tree
from pure_loopgrad._levels import active_levels, is_wrapped, level_of
from pure_loopgrad.errors import CapturedTensorError

MAX_VISITED = 20_000  # a bound on the search for a name, so that a body that reaches the whole program stays cheap


class Watch(TorchFunctionMode):
    """Sees every tensor argument of every torch function, and notes those that were not given and not made inside."""

    def __init__(self, body: Callable[..., Any], given: Sequence[Tensor], what: str = "body") -> None:
        super().__init__()
        self.body = inspect.unwrap(body)
        self.what = what
        self.known: dict[int, weakref.ref[Tensor]] = {}  # by id, for as long as the tensor lives
        self.seen: list[Tensor] = []
        self._learn(given)

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        strangers = [t for t in _tensors((args, kwargs)) if not self._is_known(t) and _needs_gradient(t)]
        for t in strangers:
            if func.__name__ != "__get__" and is_wrapped(t) and self._is_from_outside(t):
                raise captured_error(self, [t])
        self.seen += strangers
        out = func(*args, **kwargs)
        self._learn(_tensors(out))
        return out

    def _learn(self, tensors: Iterable[Tensor]) -> None:
        """Weakly: a watched iteration must not hold more memory than any other."""
        for t in tensors:
            self.known[id(t)] = weakref.ref(t, functools.partial(self._forget, id(t)))

    def _forget(self, key: int, _: weakref.ref[Tensor]) -> None:
        self.known.pop(key, None)

    def _is_known(self, t: Tensor) -> bool:
        """Whether the tensor, or what a transform inside the body wrapped, was given or made inside."""
        while id(t) not in self.known:
            inner = torch.func.debug_unwrap(t, recurse=False)
            if inner is t:
                return False
            t = inner
        return True

    def _is_from_outside(self, t: Tensor) -> bool:
        """Whether a wrapped stranger is captured, or only the business of a transform inside the body.

        A level above those that are active here can only come from outside. Levels inside the body reuse the numbers
        of those around the loop, so for the rest the question is whether the body's closure leads to the tensor.
        """
        return level_of(t) > active_levels() or find_name(self.body, t) is not None


def refuse_captured(watch: Watch, given: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """Raises if the outputs' graph leads to a leaf that the graphs of what was given do not lead to."""
    foreign = graph_leaves(outputs) - graph_leaves(given)
    if foreign:
        raise captured_error(watch, [t for t in watch.seen if graph_leaves([t]) & foreign])


def graph_leaves(tensors: Sequence[Tensor]) -> set[Tensor]:
    """The leaves that require grad behind some tensors, below all transforms (tensors hash by identity)."""
    plain = [torch.func.debug_unwrap(t) for t in tensors]
    leaves = {t for t in plain if t.requires_grad and t.is_leaf}
    nodes = [t.grad_fn for t in plain if t.grad_fn is not None]
    visited = set(nodes)
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):  # the node of a leaf
            leaves.add(node.variable)
        new = {parent for parent, _ in node.next_functions if parent is not None} - visited
        visited |= new
        nodes.extend(new)
    return leaves


def captured_error(watch: Watch, tensors: Sequence[Tensor]) -> CapturedTensorError:
    """The error that names each captured tensor, its shape and dtype, and what to do."""
    unique = list({id(t): t for t in tensors}.values())
    what = "; ".join(f"{find_name(watch.body, t) or 'a tensor'} ({_tree.describe(t)})" for t in unique)
    return CapturedTensorError(
        f"the {watch.what} uses {what or 'a tensor'} without being given it, so it would get no gradient. "
        f"Pass it in params (for a module: plg.from_module), or .detach() it outside of the {watch.what} if it is a "
        f"constant. plg.run(check='off') turns this check off"
    )


def find_name(body: Callable[..., Any], wanted: Tensor) -> str | None:
    """The expression by which the body reaches a tensor: `w`, `self.weight`, `net.conv1.weight`, `lists['a'][0]`."""
    queue: list[tuple[str, Any]] = list(_callable_children("", body))
    visited: set[int] = {id(body)}
    while queue and len(visited) < MAX_VISITED:
        name, value = queue.pop(0)
        if value is wanted:
            return name
        if id(value) not in visited:
            visited.add(id(value))
            queue.extend(_children(name, value))
    return None


def _children(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What one can reach from a value in one step, with the expression that reaches it."""
    if isinstance(value, torch.nn.Module):
        yield from ((f"{name}.{n}", t) for n, t in [*value.named_parameters(), *value.named_buffers()])
    elif isinstance(value, Mapping):
        yield from ((f"{name}[{k!r}]", v) for k, v in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"{name}[{i}]", v) for i, v in enumerate(value))
    elif callable(value) and not isinstance(value, type):
        yield from _callable_children(name, value)
    if not isinstance(value, (Tensor, ModuleType, type, FunctionType)) and hasattr(value, "__dict__"):
        yield from ((f"{name}.{k}", v) for k, v in vars(value).items())


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
        yield from _children(name or type(fn).__name__, fn)
    else:
        yield from _instance_children(name, fn)


def _instance_children(name: str, obj: Any) -> Iterator[tuple[str, Any]]:
    """A callable object: its attributes, what it wraps, and its `__call__`."""
    yield from ((f"{name or 'self'}.{k}", v) for k, v in getattr(obj, "__dict__", {}).items())
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
    yield from ((n, fn.__globals__[n]) for n in _global_names(fn.__code__) if n in fn.__globals__)


def _global_names(code: CodeType) -> Iterator[str]:
    """Global names that a function or one nested in it mentions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors among a torch function's arguments, which are nested in plain containers only."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from _tensors(v)
    elif isinstance(value, dict):
        for v in value.values():
            yield from _tensors(v)


def _needs_gradient(t: Tensor) -> bool:
    return is_wrapped(t) or (t.requires_grad and torch.is_grad_enabled())
