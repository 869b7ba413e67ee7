"""The user's body as a function of flat tensors, checked against what its first call returned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from pure_loopgrad import _tree
from pure_loopgrad._capture import Watch, refuse_captured
from pure_loopgrad._effects import recomputing
from pure_loopgrad._nonfinite import check_outputs
from pure_loopgrad._purity import REMEDY
from pure_loopgrad._shapes import Meta
from pure_loopgrad._trace import Trace, where
from pure_loopgrad.errors import ImpureBodyError, LoopGradError, add_note

Tensors: TypeAlias = Sequence[Tensor]
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

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        trace = self.trace
        settings = nullcontext() if trace.settled else trace.ambient.restored()
        # the caller's grad mode, as in a plain loop; inputs are detached, so that this records nothing by itself
        with settings, torch.set_grad_enabled(trace.grad_mode or torch.is_grad_enabled()):
            trace.effects.cursor = 0
            try:
                out = self._checked(tensors) if trace.checking else self.fn(*self._arguments(tensors))
            except LoopGradError:
                raise
            except Exception as error:
                add_note(error, self._situation(tensors))
                raise
            leaves, spec = _tree.numbers_to_tensors(out, tensors, "output")
        self._compare_with_first(leaves, spec)
        if trace.checking:
            self._compare_values(leaves)
        if trace.debug_nonfinite:
            outputs = dict(zip(self.output_paths(), leaves, strict=True))
            check_outputs(trace.iterations, outputs, dict(zip(self.input_paths(), tensors, strict=True)), self.leading)
        return leaves

    def _checked(self, tensors: Tensors) -> Any:
        trace = self.trace
        if recomputing():
            trace.sight.refuse_changed_constants(self.fn)
        if recomputing() or not trace.grad_mode:
            return self.fn(*self._arguments(tensors))
        with Watch(self.fn, tensors, trace.sources.given) as watch:
            out = self.fn(*self._arguments(tensors))
        refuse_captured(watch, tensors, _tree.split(out)[0])
        trace.sight.note_captured(watch)
        return out

    def _situation(self, tensors: Tensors) -> str:
        """Where the body raised, and what it was given."""
        given = "; ".join(f"{p} has {_tree.describe(t)}" for p, t in zip(self.input_paths(), tensors, strict=True))
        when = f"{'recomputed ' if recomputing() else ''}{where(self.trace)} of {self.trace.n}"
        return f"raised by the body in {when}, where {given or 'nothing is given'}"

    def input_paths(self) -> list[str]:
        """The path of each tensor that the body is given."""
        roots = {1: ("arguments",), 2: ("params", "x"), 3: ("params", "carry", "x")}[len(self.args)]
        return [p for root, skeleton in zip(roots, self.args, strict=True) for p in skeleton.tensor_paths(root)]

    def output_paths(self) -> list[str]:
        """The path of each output; known once the body has run."""
        assert self.trace.outputs is not None
        return self.trace.outputs.tensor_paths("output")

    def _arguments(self, tensors: Tensors) -> list[Any]:
        parts, start = [], 0
        for skeleton in self.args:
            parts.append(skeleton.fill(tensors[start : start + skeleton.n_tensors]))
            start += skeleton.n_tensors
        return parts

    def _compare_with_first(self, leaves: list[Tensor], spec: _tree.TreeSpec) -> None:
        trace = self.trace
        found = [Meta(tuple(t.shape[self.leading :]), t.dtype, t.device) for t in leaves]
        if trace.outputs is None:
            trace.outputs, trace.shapes = _tree.Skeleton.of_tensors(spec), found
        elif trace.outputs.spec != spec:
            raise ImpureBodyError(
                f"the body's output changed its structure in {where(trace)}: first {trace.outputs.spec}, "
                f"now {spec}. {IMPURE}"
            )
        elif found != trace.shapes:
            paths = self.output_paths()
            path, first, now = next((p, a, b) for p, a, b in zip(paths, trace.shapes, found, strict=True) if a != b)
            raise ImpureBodyError(
                f"{path} changed in {where(trace)}: first {_tree.describe(first)}, now {_tree.describe(now)}. {IMPURE}"
            )

    def _compare_values(self, leaves: list[Tensor]) -> None:
        found = self.trace.sight.differing(self.trace.iterations.start, leaves)
        if found is None:
            return
        i, first, now = found
        raise ImpureBodyError(
            f"{self.output_paths()[i]} ({_tree.describe(leaves[i])}) has other values in the "
            f"recomputation of {where(self.trace)} than in the first pass (magnitudes over a sample: first "
            f"{first.scale:.6g}, now {now.scale:.6g}). {REMEDY}"
        )
