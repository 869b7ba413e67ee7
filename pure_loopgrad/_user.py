"""The user's body as a function of flat tensors, checked against what its first call returned."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from pure_loopgrad import _tree
from pure_loopgrad._capture import Watch, refuse_captured, refuse_captured_later, refuse_misplaced
from pure_loopgrad._constants import Unwrapping, reaches_generator
from pure_loopgrad._effects import recomputing, repeating, where
from pure_loopgrad._levels import active_levels
from pure_loopgrad._nonfinite import check_outputs
from pure_loopgrad._own_leaves import REMEDY as OWN_GRADIENT
from pure_loopgrad._own_leaves import OwnLeaves, asks_for_grad
from pure_loopgrad._purity import REMEDY
from pure_loopgrad._rng import moved
from pure_loopgrad._shapes import Meta, address
from pure_loopgrad._trace import Trace
from pure_loopgrad.errors import ImpureBodyError, LoopGradError, add_note

Tensors: TypeAlias = Sequence[Tensor]
Terms: TypeAlias = "Sequence[Tensor | None]"  # what a chunk contributes: None is zero, in all chunks but the first
NOTHING = nullcontext()
IMPURE = (
    "Every iteration, and every recomputation of it, must return the same structure, shapes and dtypes: look for a "
    "side effect (a Python counter, a changed global) or an output whose shape depends on the data; pad the latter"
)


@dataclass(frozen=True, eq=False)
class UserBody:
    """`fn(params, x)` as a function of flat tensors; refuses outputs that differ from the first ones."""

    fn: Callable[..., Any]
    args: tuple[_tree.Skeleton, ...]  # the skeletons of params and of one x (or of a chunk of them)
    trace: Trace
    leading: int = 0  # how many leading axes of the outputs may differ from call to call
    __name__: ClassVar[str] = "body"  # torch.vmap asks for it at each call, and would take the repr of all this

    def __post_init__(self) -> None:
        self.trace.constants.find(self.fn)

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        if torch.compiler.is_dynamo_compiling():
            return self._traced(tensors)
        trace = self.trace
        usual = trace.settled and trace.outputs is not None and not trace.watching
        if usual and not trace.checking and not trace.debug_nonfinite:
            return self.accepted(self.output(tensors), tensors)  # as nearly always
        with NOTHING if trace.settled else trace.ambient.restored():
            return self._examined(tensors)

    def _traced(self, tensors: Tensors) -> list[Tensor]:
        """Inside a chunk that is compiled, which is none of those that are checked: nothing but the body itself, and
        the shapes, which are compared while dynamo traces and cost nothing afterwards.
        """
        trace = self.trace
        assert trace.outputs is not None
        with torch.set_grad_enabled(trace.grad_mode):
            out = self.fn(*self._arguments(tensors))
        found = trace.outputs.template.take(out)
        device = tensors[0].device if tensors else None
        leaves = [y if isinstance(y, Tensor) else torch.tensor(y, device=device) for y in found]
        for y, first in zip(leaves, trace.shapes, strict=True):
            if y.shape[self.leading :] != first.shape or y.dtype != first.dtype:
                raise ImpureBodyError("an output has changed")  # the eager run that follows says which
        return leaves

    def _examined(self, tensors: Tensors) -> list[Tensor]:
        """The same with what the first iteration shows, and what is looked at in those that are checked."""
        trace, checking = self.trace, self.trace.checking
        before = trace.sources.state() if trace.compile is not False and trace.outputs is None else None
        leaves = self.accepted(self.output(tensors), tensors)
        if before is not None:
            trace.draws = moved(before, trace.sources.state())
        if checking:
            self._compare_values(leaves)
        if trace.debug_nonfinite:
            outputs = dict(zip(self.output_paths(), leaves, strict=True))
            check_outputs(trace.iterations, outputs, dict(zip(self.input_paths(), tensors, strict=True)), self.leading)
        return leaves

    def output(self, tensors: Tensors) -> Any:
        """What the body returns; an error of its own is raised with the iteration and the shapes."""
        trace = self.trace
        trace.effects.cursor = 0
        # the grad mode of the caller, as in a plain loop; inputs are detached, so that this records nothing by itself
        recording = trace.grad_mode and not torch.is_grad_enabled()
        try:
            with torch.enable_grad() if recording else NOTHING:
                return self._checked(tensors) if trace.checking or trace.watching else self._call(tensors)
        except Exception as error:
            self._note_situation(error, tensors)
            raise

    def unchecked(self) -> Callable[[Tensors, Tensors], Any]:
        """`output`, of the tensors of params and of x, for iterations that are not checked; what all of these share is
        looked up once.
        """
        fn, effects, grad_mode = self.fn, self.trace.effects, self.trace.grad_mode
        fill_params, fill_x = (skeleton.filling() for skeleton in self.args)
        recording = torch.enable_grad()

        def output(params: Tensors, x: Tensors) -> Any:
            effects.cursor = 0
            try:
                if not grad_mode or torch.is_grad_enabled():
                    return fn(fill_params(params), fill_x(x))
                with recording:
                    return fn(fill_params(params), fill_x(x))
            except Exception as error:
                self._note_situation(error, [*params, *x])
                raise

        return output

    def accepted(self, out: Any, tensors: Tensors) -> list[Tensor]:
        """The output's leaves, which are like those of the first call.

        Raises:
            ImpureBodyError: they are not.
        """
        leaves, spec = _tree.numbers_to_tensors(out, tensors, "output")
        if self.trace.constants.plain:
            leaves = self.trace.constants.unwrapped(leaves)
        self._compare_with_first(leaves, spec)
        if self.trace.grad_mode and self.trace.check != "off" and not repeating():
            refuse_captured_later(self.fn, tensors, leaves, self.trace.sight.unnamed)
        return leaves

    def _checked(self, tensors: Tensors) -> Any:
        trace = self.trace
        if repeating():
            trace.sight.refuse_changed_constants(self.fn)
            return self._repeated(tensors)
        if not (trace.grad_mode or trace.constants.inside):
            return self._call(tensors)
        if trace.outputs is None:
            found = reaches_generator(self.fn, {*map(id, trace.sources.given)})
            trace.watching = found or not trace.constants.lacks_nothing
        return self._watched(tensors)

    def _watched(self, tensors: Tensors) -> Any:
        trace, notes = self.trace, self.trace.checking and self.trace.grad_mode
        before = None if trace.trains else trace.sources.state()
        own_leaves = self._own_leaves(tensors, not trace.makes_leaves)  # else they are permitted in any case
        with Watch(self.fn, tensors, trace.sources.given) as watch, own_leaves:
            out = self._call(tensors)
            leaves = _tree.split(out)[0]
            refuse_captured(watch, tensors, leaves)
            if notes:  # while the watch knows what was made
                trace.sight.kept[trace.iterations.start] = watch.kept(leaves)
                strangers = list(watch.strangers(leaves))
        trace.makes_leaves = trace.makes_leaves or watch.makes_leaves
        if watch.slows_attention and before is not None and not trace.effects.found:
            trace.sources.restore(before)
            out = self._call(tensors)
        if notes:
            trace.foreign.update(address(torch.func.debug_unwrap(t)) for t in strangers)
            trace.sight.note_captured(watch)
        return out

    def _repeated(self, tensors: Tensors) -> Any:
        kept = self.trace.sight.kept.get(self.trace.iterations.start)
        if kept is None:
            return self._call(tensors)
        with kept.refused(self.fn, tensors):
            out = self._call(tensors)
        kept.refuse_returned(self.fn, tensors, _tree.split(out)[0])
        return out

    def _call(self, tensors: Tensors) -> Any:
        constants = self.trace.constants
        unwrapping = Unwrapping(constants) if constants.plain else NOTHING
        with unwrapping, self._own_leaves(tensors, self.trace.makes_leaves):
            return self.fn(*self._arguments(tensors))

    def _own_leaves(self, tensors: Tensors, wanted: bool) -> AbstractContextManager[object]:
        return OwnLeaves(tensors) if wanted and active_levels() > 0 else NOTHING

    def _note_situation(self, error: Exception, tensors: Tensors) -> None:
        """Adds to an error of the body where it was raised, and what was given."""
        if isinstance(error, LoopGradError):
            return
        constants = self.trace.constants
        if constants.inside:
            refuse_misplaced(error, inspect.unwrap(self.fn), [*constants.strangers.values(), *constants.wrapped])
        given = "; ".join(f"{p} has {_tree.describe(t)}" for p, t in zip(self.input_paths(), tensors, strict=True))
        when = f"{'recomputed ' if recomputing() else ''}{where(self.trace)} of {self.trace.n}"
        add_note(error, f"raised by the body in {when}, where {given or 'nothing is given'}")
        if "register a hook" in str(error):
            add_note(error, "a first pass records no graph. Register the hook where h.requires_grad, in a later pass")
        if active_levels() > 0 and (self.trace.makes_leaves or asks_for_grad(error)):
            add_note(error, OWN_GRADIENT)

    def input_paths(self) -> list[str]:
        """The path of each tensor that the body is given."""
        roots = {1: ("arguments",), 2: ("params", "x"), 3: ("params", "carry", "x")}[len(self.args)]
        return [p for root, skeleton in zip(roots, self.args, strict=True) for p in skeleton.tensor_paths(root)]

    def output_paths(self) -> list[str]:
        """The path of each output; known once the body has run."""
        assert self.trace.outputs is not None
        return self.trace.outputs.tensor_paths("output")

    def _arguments(self, tensors: Tensors) -> list[Any]:
        return [skeleton.fill(tensors[part]) for skeleton, part in self._parts]

    @functools.cached_property
    def _parts(self) -> list[tuple[_tree.Skeleton, slice]]:
        """For each argument, which tensors are its own."""
        ends = list(accumulate((skeleton.n_tensors for skeleton in self.args), initial=0))
        return [(skeleton, slice(a, b)) for skeleton, a, b in zip(self.args, ends, ends[1:], strict=False)]

    def _compare_with_first(self, leaves: list[Tensor], spec: _tree.TreeSpec) -> None:
        trace = self.trace
        if trace.outputs is None:
            trace.outputs = _tree.Skeleton.of_tensors(spec)
            trace.shapes = [self._meta(t) for t in leaves]
        elif trace.outputs.spec != spec:
            raise ImpureBodyError(
                f"the body's output changed its structure in {where(trace)}: first {trace.outputs.spec}, "
                f"now {spec}. {IMPURE}"
            )
        elif not all(map(self._is_like, leaves, trace.shapes)):
            found = map(self._meta, leaves)
            changes = zip(self.output_paths(), trace.shapes, found, strict=True)
            path, first, now = next((p, a, b) for p, a, b in changes if a != b)
            raise ImpureBodyError(
                f"{path} changed in {where(trace)}: first {_tree.describe(first)}, now {_tree.describe(now)}. {IMPURE}"
            )

    def _meta(self, t: Tensor) -> Meta:
        return Meta(tuple(t.shape[self.leading :]), t.dtype, t.device)

    def _is_like(self, t: Tensor, first: Meta) -> bool:
        shape = t.shape[self.leading :] if self.leading else t.shape
        return shape == first.shape and t.dtype == first.dtype and t.device == first.device

    def _compare_values(self, leaves: list[Tensor]) -> None:
        self.trace.comparing = True
        found = self.trace.sight.differing(self.trace.iterations.start, leaves)
        self.trace.comparing = False
        if found is None:
            return
        i, first, now = found
        raise ImpureBodyError(
            f"{self.output_paths()[i]} ({_tree.describe(leaves[i])}) has other values in the "
            f"recomputation of {where(self.trace)} than in the first pass (magnitudes over a sample: first "
            f"{first.scale:.6g}, now {now.scale:.6g}). {REMEDY}"
        )
