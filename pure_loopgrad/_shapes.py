"""Outputs of a loop of no iterations: their shapes are found on fake tensors, so that the body sees no garbage."""

from __future__ import annotations

import torch
from torch import Tensor

# torch has no public way to run a function on tensors that have a device but no data; the meta device is public, but a
# body that makes a CPU tensor of its own then mixes devices. tests/test_shapes.py says so if this moves.
from torch._subclasses.fake_tensor import FakeTensorMode

from pure_loopgrad._body import ChunkBody, Tensors
from pure_loopgrad._tree import describe
from pure_loopgrad.errors import LoopGradError, ShapeInferenceError


def outputs_of_none(body: ChunkBody, consts: Tensors, xs: Tensors) -> tuple[list[Tensor], list[Tensor]]:
    """Zero sums and empty stacks, shaped as one iteration would shape them.

    Raises:
        ShapeInferenceError: the body cannot run without data.
    """
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake_consts = [mode.from_tensor(t) for t in consts]
            fake_xs = [mode.from_tensor(t).new_empty((1, *t.shape[1:])) for t in xs]
            sums, stacks = body(fake_consts, fake_xs)
            metas = [(tuple(t.shape), t.dtype, t.device) for t in (*sums, *stacks)]
    except LoopGradError:
        raise
    except Exception as error:
        seen = ", ".join(describe(t) for t in xs)
        raise ShapeInferenceError(
            f"the loop has no iterations (xs: {seen}), and the shapes of its outputs could not be found without data: "
            f"the body raised {type(error).__name__}: {error}. Handle n = 0 before the call"
        ) from error
    n_sums = len(sums)
    zeros = [torch.zeros(s, dtype=d, device=where) for s, d, where in metas[:n_sums]]
    empty = [torch.empty((0, *s[1:]), dtype=d, device=where) for s, d, where in metas[n_sums:]]
    return zeros, empty
