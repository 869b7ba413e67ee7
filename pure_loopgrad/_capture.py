"""Tensors that a body uses without being given them: they would get no gradient, so they are refused.

Two ways to need a gradient, two ways to be found. A tensor of an outer torch.func transform is wrapped, and is refused
where it is used. A plain tensor that requires grad shows in the graph of the outputs, as a leaf that is no input: that
has no false alarms, whatever path the value took, and the tensors seen on the way give the names.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pure_loopgrad import _tree
from pure_loopgrad._dual_level import has_tangent, in_dual_level
from pure_loopgrad._levels import active_levels, is_wrapped, layers, level_of, needs_gradient
from pure_loopgrad._memo import Kept, Sources, sources_of
from pure_loopgrad._names import find_name, reachable
from pure_loopgrad._own_leaves import makes_leaf
from pure_loopgrad.errors import CapturedTensorError, ImpureBodyError

Known: TypeAlias = "dict[int, weakref.ref[Tensor]]"  # by id, for as long as they live


class Watch(TorchFunctionMode):
    """Sees every tensor argument of every torch function, and notes those that were not given and not made inside."""

    def __init__(
        self, body: Callable[..., Any], given: Sequence[Tensor], replayed: Sequence[Any] = (), what: str = "body"
    ) -> None:
        super().__init__()
        self.body = inspect.unwrap(body)
        self.what = what
        self.replayed = (torch.default_generator, *replayed)
        self.given = given
        self.in_dual_level = in_dual_level()  # around the loop, and not one that the body opens
        self.known: Known = {}
        self.seen: list[Tensor] = []  # strangers that need a gradient
        self.constants: list[tuple[weakref.ref[Tensor], int]] = []  # the others, with their versions at first sight
        self.sources: dict[int, Sources] = {}  # by id, of what was computed from what was given
        self.makes_leaves = False  # whether the body calls requires_grad_
        self.slows_attention = False  # whether attention ran, which has another way where no mode sees it
        self._learn(given)
        for i, t in enumerate(given):
            self._trace_back([t], 1 << i)

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # else dynamo would trace what follows, fail, and never compile the body
            return func(*args, **kwargs)
        self._refuse_foreign_generator(kwargs.get("generator"))
        self.slows_attention = self.slows_attention or func is F.multi_head_attention_forward
        arguments = list(_tree.tensors_in((args, kwargs)))
        for t in arguments:
            if not self._is_known(t):
                self._meet(t, func)
        self.makes_leaves = self.makes_leaves or makes_leaf(func)
        out = func(*args, **kwargs)
        results = list(_tree.tensors_in(out))
        self._learn(results)
        changed = arguments[:1] if func.__name__ == "__setitem__" else results
        self._trace_back(changed, sources_of(func, arguments, self.sources))
        for t in _written(func, args, kwargs):
            self._note_written(t)
        return out

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.given = ()  # the callbacks of `known` refer back to here, and such a ring lives until it is collected
        self.known.clear()

    def strangers(self, outputs: Iterable[Any]) -> Iterator[Tensor]:
        """The constants that were read, and those of the outputs that were neither given nor made inside."""
        yield from (t for ref, _ in self.constants if (t := ref()) is not None)
        yield from (t for t in outputs if isinstance(t, Tensor) and not self._is_known(t))

    def kept(self, outputs: Sequence[Any]) -> Kept:
        """What lives of that which the body has computed from what it was given."""
        here, own = {id(t) for t in outputs}, {id(t) for t in self.given}
        found = [(key, (self.known[key], s)) for key, s in self.sources.items() if key not in own]
        return Kept([pair for key, pair in found if key not in here], [pair for key, pair in found if key in here])

    def _trace_back(self, tensors: Iterable[Tensor], sources: Sources) -> None:
        for t in tensors if sources else ():
            if _tree.is_differentiable(t):
                self.sources[id(t)] = self.sources.get(id(t), 0) | sources

    def _meet(self, t: Tensor, func: Callable[..., Any]) -> None:
        if self.in_dual_level and not is_wrapped(t) and has_tangent(t):
            if func.__name__ not in ("__get__", "detach"):
                raise captured_error(self.body, self.what, [t])
            return
        if not (is_wrapped(t) or (t.requires_grad and torch.is_grad_enabled())):
            self.constants.append((weakref.ref(t), version_of(t)))
            self._learn([t])
            return
        if func.__name__ != "__get__" and is_wrapped(t) and self._is_from_outside(t):
            raise captured_error(self.body, self.what, [t])
        self.seen.append(t)

    def _note_written(self, t: Tensor) -> None:
        if any(t is g for g in self.given):
            raise ImpureBodyError(
                f"the {self.what} has batch_norm update an input ({_tree.describe(t)}) in place, which a recomputation "
                f"would do again. Carry the running statistics with plg.scan, or use plg.from_module"
            )
        self.constants = [(ref, -1 if ref() is t else version) for ref, version in self.constants]

    def _refuse_foreign_generator(self, generator: Any) -> None:
        if generator is None or any(generator is g for g in self.replayed):
            return
        if (name := find_name(self.body, generator)) is not None:  # else the body has made it itself
            raise ImpureBodyError(
                f"the {self.what} draws from the generator {name}, which a recomputation would find moved on. Pass it "
                f"in params, or have it replayed: plg.run(generators=({name},))"
            )

    def _learn(self, tensors: Iterable[Tensor]) -> None:
        """Weakly: a watched iteration must not hold more memory than any other."""
        for t in tensors:
            self.known[id(t)] = weakref.ref(t, functools.partial(self._forget, id(t)))

    def _forget(self, key: int, _: weakref.ref[Tensor]) -> None:
        self.known.pop(key, None)
        self.sources.pop(key, None)

    def _is_known(self, t: Tensor) -> bool:
        """Whether the tensor, or what a transform inside the body wrapped, was given or made inside."""
        return id(t) in self.known or any(id(layer) in self.known for layer in layers(t))

    def _is_from_outside(self, t: Tensor) -> bool:
        """Whether a wrapped stranger is captured, or only the business of a transform inside the body.

        A level above those that are active here can only come from outside. Levels inside the body reuse the numbers
        of those around the loop, so for the rest the question is whether the body's closure leads to the tensor.
        """
        return level_of(t) > active_levels() or find_name(self.body, t) is not None


def refuse_captured(watch: Watch, given: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """Raises if the outputs' graph leads to a leaf that was not made inside, and to which the graphs of what was given
    do not lead. Called while the watch lasts, which knows what was made.
    """
    with unwatched():
        foreign = {t for t in graph_leaves(outputs) - graph_leaves(given) if id(t) not in watch.known}
        if foreign:
            raise captured_error(watch.body, watch.what, [t for t in watch.seen if graph_leaves([t]) & foreign])


def refuse_captured_later(
    body: Callable[..., Any], given: Sequence[Tensor], outputs: Sequence[Tensor], unnamed: Known
) -> None:
    """Raises if the outputs' graph leads to a leaf that was not given, in an iteration that nobody watches.

    What a first pass is given are leaves or constants. A leaf beside them was made inside, or is from elsewhere; then
    the body leads to it, or an earlier iteration has used it as well. Where what is given has a graph of its own, the
    gradient finds its way by itself.

    Args:
        body: what was called.
        given: to the body.
        outputs: of the body.
        unnamed: leaves of earlier iterations to which the body does not lead; the new ones are added.
    """
    if not any(map(needs_gradient, outputs)):
        return
    sources = [t for t in given if needs_gradient(t)]
    if not all(t.is_leaf for t in sources) or not (foreign := graph_leaves(outputs) - graph_leaves(sources)):
        return
    body = inspect.unwrap(body)
    captured = [t for _, t in reachable(body) if isinstance(t, Tensor) and graph_leaves([t]) & foreign]
    captured = captured or [t for t in foreign if id(t) in unnamed and unnamed[id(t)]() is t]
    if captured:
        raise captured_error(body, "body", captured)
    unnamed.update((id(t), weakref.ref(t)) for t in foreign)


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


def captured_error(body: Callable[..., Any], what: str, tensors: Sequence[Tensor]) -> CapturedTensorError:
    """The error that names each captured tensor, its shape and dtype, and what to do."""
    unique = list({id(t): t for t in tensors}.values())
    names = "; ".join(f"{find_name(body, t) or 'a tensor'} ({_tree.describe(t)})" for t in unique)
    return CapturedTensorError(
        f"the {what} uses {names or 'a tensor'} without being given it, so it would get no gradient. "
        f"Pass it in params (for a module: plg.from_module), or .detach() it outside of the {what} if it is a "
        f"constant. plg.run(check='off') turns this check off"
    )


def refuse_misplaced(error: Exception, body: Callable[..., Any], suspects: Sequence[Tensor]) -> None:
    """Raises in place of an error with which torch meets a tensor of a transform around the loop where it expects none.

    Args:
        error: what torch has raised.
        body: what was called.
        suspects: tensors of transforms around the loop that the body is known to reach.
    """
    text = str(error)
    asserts = "INTERNAL ASSERT FAILED" in text and (suspects or "functorch" in text)
    if not asserts and "escaped from inside a function being vmap" not in text:
        return
    names = [f"{find_name(body, t) or 'a tensor'} ({_tree.describe(t)})" for t in suspects[:3]]
    listed = f": {'; '.join(names)}{'; ...' if len(suspects) > 3 else ''}" if names else ""
    raise CapturedTensorError(
        f"the body uses a tensor of a torch.func transform around the loop where torch takes none{listed}. Pass it in "
        f"params. A constant that the body hands to a transform of its own can also be made outside of the one around"
    ) from error


def _written(func: Callable[..., Any], args: Any, kwargs: Any) -> list[Tensor]:
    """What batch_norm in train mode writes without counting it as a change."""
    if func not in _STATISTICS:
        return []
    mean, var, training = _STATISTICS[func](*args, **kwargs)
    return [t for t in (mean, var) if training and t is not None]


_STATISTICS: dict[Any, Callable[..., tuple[Tensor | None, Tensor | None, bool]]] = {
    F.batch_norm: lambda x, mean, var, weight=None, bias=None, training=False, *_, **__: (mean, var, training),
    torch.batch_norm: lambda x, weight, bias, mean, var, training, *_, **__: (mean, var, training),
}


def unwatched() -> AbstractContextManager[None]:
    """A block whose torch functions no mode sees: bookkeeping inside a body.

    A private name of torch, which has no public one for it; tests/test_private_torch.py says so if it moves.
    """
    return torch._C.DisableTorchFunction()


def version_of(t: Tensor) -> int:
    """How often a tensor was changed in place; an inference tensor does not count."""
    plain = torch.func.debug_unwrap(t)
    return 0 if plain.is_inference() else plain._version
