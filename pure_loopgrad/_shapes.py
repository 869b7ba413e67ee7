"""Shapes without data, for a loop of no iterations: the body runs on fake tensors, so that it sees no garbage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

# torch has no public way to run a function on tensors that have a device but no data; the meta device is public, but a
# body that makes a CPU tensor of its own then mixes devices. tests/test_private_torch.py says so if this moves.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from pure_loopgrad import _effects
from pure_loopgrad._levels import below_all_levels, is_wrapped, needs_gradient
from pure_loopgrad._tree import describe
from pure_loopgrad.errors import LoopGradError, ShapeInferenceError


class Meta(NamedTuple):
    """What a tensor would be."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, t: Tensor) -> Meta:
        return cls(tuple(t.shape), t.dtype, t.device)

    def with_axis(self, position: int, length: int) -> Meta:
        """One more axis, before the one at `position`."""
        return self._replace(shape=(*self.shape[:position], length, *self.shape[position:]))

    def zeros(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


Outline = tuple[list[Meta], list[Meta]]  # of the sums and of the stacks; of the latter with the iterations first


def is_fake(t: Tensor) -> bool:
    """Whether a tensor has no values."""
    plain = torch.func.debug_unwrap(t)
    return plain.is_meta or isinstance(plain, FakeTensor)


@contextmanager
def without_data() -> Iterator[FakeTensorMode]:
    """A block whose tensors have no data and whose effects nobody sees; the mode turns tensors into such ones."""
    with _effects.rehearsal(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


def run_on_fakes(body: Callable[..., Any], shared: Sequence[Tensor], xs: Sequence[Tensor]) -> None:
    """Calls a body with fake tensors: the shared ones, and one of shape `x.shape[1:]` for each of xs.

    Raises:
        ShapeInferenceError: the body cannot run without data.
    """
    try:
        with without_data() as mode:
            fakes = [fake(mode, t) for t in shared]
            body(*fakes, *(fake(mode, x).new_empty(x.shape[1:]) for x in xs))
    except LoopGradError:
        raise
    except Exception as error:
        seen = ", ".join(describe(t) for t in xs)
        raise ShapeInferenceError(
            f"the loop has no iterations (xs: {seen}), and the shapes of its outputs could not be found without data: "
            f"the body raised {type(error).__name__}: {error}. Handle n = 0 before the call"
        ) from error


def fake(mode: FakeTensorMode, t: Tensor) -> Tensor:
    """One that looks like another; for a tensor of a torch.func transform, which torch cannot turn into a fake one, a
    plain one of the shape that is seen inside.
    """
    if not is_wrapped(t):
        return mode.from_tensor(t)
    shape, strides, recorded = t.shape, t.stride(), needs_gradient(t)
    with below_all_levels():
        return torch.empty_strided(shape, strides, dtype=t.dtype, device=t.device, requires_grad=recorded)


def address(t: Tensor) -> int:
    """Where the tensor's data begin; 0 where there are none, or not in one place."""
    return 0 if is_fake(t) or t.layout is not torch.strided else t.untyped_storage().data_ptr()
