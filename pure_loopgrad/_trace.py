"""What the first pass of one call finds out, for the later ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pure_loopgrad import _tree
from pure_loopgrad._ambient import Ambient
from pure_loopgrad._constants import Constants
from pure_loopgrad._dual_level import in_dual_level
from pure_loopgrad._effects import Effects, enclosing, recomputing, rehearsal
from pure_loopgrad._levels import active_levels, draws_for_nobody, is_wrapped
from pure_loopgrad._progress import Progress
from pure_loopgrad._purity import FirstSight, foreign_draws_refused
from pure_loopgrad._rng import Sources, left_alone, moved
from pure_loopgrad._run import Check, Compile, Run, Save, reports_of
from pure_loopgrad._shapes import Meta
from pure_loopgrad.errors import LoopValueError


@dataclass
class Trace:
    """What the first pass of one call finds out; the later passes read it. Made by each call, kept by its graph."""

    sources: Sources
    ambient: Ambient
    grad_mode: bool
    check: Check
    debug_nonfinite: bool
    progress: Progress | None
    compile: Compile
    save: Save
    n: int  # iterations of the whole loop, for messages
    needed: bool  # whether something that was given needs a gradient or a tangent, or may
    outputs: _tree.Skeleton | None = None
    shapes: list[Meta] = field(default_factory=list)  # of one iteration's outputs
    constants: Constants = field(default_factory=Constants)
    differentiates: bool = False  # whether the call itself asks for a gradient, whatever the grad mode around it
    draws: bool = False  # whether some iteration drew random numbers
    settled: bool = False  # whether the ambient settings are in force around the pass that runs now
    iterations: range = range(0)  # the chunk that runs now
    watching: bool = False  # whether every iteration of the first pass is watched, as the body leads to what needs it
    makes_leaves: bool = False  # whether the body calls requires_grad_
    comparing: bool = False  # whether the operations that run now are ours, on what the body has returned
    foreign: set[int] = field(default_factory=set)  # where the constants are that the body may return; see `own`
    sight: FirstSight = field(default_factory=FirstSight)
    effects: Effects = field(default_factory=Effects)

    @classmethod
    def begin(cls, tensors: Sequence[Tensor], skeletons: Sequence[_tree.Skeleton], n: int, run: Run) -> Trace:
        """A trace for a call that starts here and now."""
        leaves = (leaf for skeleton in skeletons for leaf in skeleton.static)
        sources = Sources.of(tensors, leaves, run.generators)
        ambient, debug = Ambient.capture(sources.devices), run.nonfinite == "raise"
        grad_mode, reports = torch.is_grad_enabled(), reports_of(run)
        needed = in_dual_level() or any(t.requires_grad or is_wrapped(t) for t in tensors)
        trace = cls(sources, ambient, grad_mode, run.check, debug, reports, run.compile, run.save, n, needed)
        for outer in enclosing():
            trace.constants.inherit(outer.constants)
        return trace

    @property
    def trains(self) -> bool:
        """Whether a gradient may be asked for."""
        return (self.grad_mode and self.needed) or self.differentiates

    @property
    def checking(self) -> bool:
        """Whether the iterations that run now are among those that are checked."""
        return self.check == "all" or (self.check == "first" and self.iterations.start == 0)

    @property
    def examines_all(self) -> bool:
        """Whether something is looked at in every iteration, and not in the first one alone."""
        return self.check == "all" or self.debug_nonfinite

    @property
    def repeats(self) -> bool:
        """Whether a chunk may run once more, or in part: it draws nothing, and has no effects."""
        return not self.draws and not self.effects.found


@contextmanager
def unnoticed(sources: Sources) -> Iterator[None]:
    """A block that only finds something out: no gradient, no draw and no change of a buffer is seen outside of it."""
    with left_alone(sources), torch.no_grad(), rehearsal():
        yield


@contextmanager
def first_pass_checked(trace: Trace, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Around a call's first pass: refuses draws that no later pass can replay, or that vmap would have made apart."""
    if trace.check == "off" or recomputing():
        yield
        return
    matters = trace.grad_mode or active_levels() > 0 or trace.sources.vmapped
    asked = draws_for_nobody(tensors)
    before = None if asked is None else trace.sources.state()
    with foreign_draws_refused(trace.sources.given) if matters else nullcontext():
        yield
    if before is not None and moved(before, trace.sources.state()):
        raise LoopValueError(
            f"the body draws random numbers under torch.vmap with randomness={asked!r}, but nothing that the loop is "
            f"given is batched, so one draw would serve the whole batch. Use randomness='same', or pass something "
            f"batched in params, for instance what distinguishes the entries"
        )
