"""Averages of parameters over training: pure functions over pytrees, in float32 for half-precision weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from pure_loopgrad import _tree
from pure_loopgrad._body import accumulation_dtype
from pure_loopgrad._named import NamedTensors
from pure_loopgrad._tree import PyTree
from pure_loopgrad.errors import LoopValueError


@dataclass(frozen=True)
class State:
    """A running average.

    Attributes:
        count: how many parameters are in it.
        wide: the average of the float leaves, at least in float32; other leaves as they came last.
        like: the last parameters, for structure and dtypes.
    """

    count: int
    wide: tuple[Tensor, ...]
    like: PyTree


Combine: TypeAlias = "Callable[[Tensor, Tensor, int], Tensor]"


@dataclass(frozen=True)
class Average:
    """An average as three pure functions: init of params, update of a state by params, and the value of a state.

    Attributes:
        combine: (average, new value, how many were in the average) -> average, for one leaf.
    """

    combine: Combine

    def init(self, params: PyTree) -> State:
        """The average of one."""
        tensors, _ = _tree.split(params)
        return State(1, tuple(_wide(t) for t in tensors), params)

    def update(self, state: State, params: PyTree) -> State:
        """One more.

        Raises:
            LoopValueError: params of another structure, or a leaf of another shape.
        """
        (tensors, skeleton), (_, first) = _tree.split(params), _tree.split(state.like)
        if skeleton.spec != first.spec:
            raise LoopValueError(f"params changed their structure: first {first.spec}, now {skeleton.spec}")
        for path, mean, t in zip(skeleton.tensor_paths("params"), state.wide, tensors, strict=True):
            _refuse_unlike(path, mean, t)
        pairs = zip(state.wide, map(_wide, tensors), strict=True)
        wide = tuple(
            self.combine(mean, new, state.count) if _tree.is_differentiable(new) else new for mean, new in pairs
        )
        return State(state.count + 1, wide, params)

    def value(self, state: State) -> PyTree:
        """The average, in the dtypes of the parameters."""
        tensors, skeleton = _tree.split(state.like)
        return skeleton.fill([mean.to(t.dtype, copy=True) for mean, t in zip(state.wide, tensors, strict=True)])


def _wide(t: Tensor) -> Tensor:
    t = t.detach()
    return t.to(accumulation_dtype(t.dtype), copy=True) if _tree.is_differentiable(t) else t.clone()


def _refuse_unlike(path: str, mean: Tensor, t: Tensor) -> None:
    """Only what is averaged has to stay what it is."""
    averaged = _tree.is_differentiable(mean), _tree.is_differentiable(t)
    if any(averaged) and (mean.shape != t.shape or not all(averaged)):
        raise LoopValueError(
            f"{path} has {_tree.describe(t)}, but its average so far {_tree.describe(mean)}: start anew with init"
        )


def ema(decay: float) -> Average:
    """The exponential moving average: `decay` times the old one and `1 - decay` times the new parameters.

    Agrees with `torch.optim.swa_utils.get_ema_multi_avg_fn`.

    Args:
        decay: between 0 and 1.

    Returns:
        An `Average`, whose states are pytrees that hold no graph.

    Raises:
        LoopValueError: another decay.

    Memory: one copy of the parameters, in float32 for half precision. Time: one pass over them for each update.

    Example:
        >>> import torch, pure_loopgrad as plg
        >>> average = plg.ema(0.5)
        >>> state = average.init({"w": torch.tensor(0.0)})
        >>> state = average.update(state, {"w": torch.tensor(1.0)})
        >>> average.value(state)
        {'w': tensor(0.5000)}
    """
    if not 0 <= decay <= 1:
        raise LoopValueError(f"decay={decay}: expected a number from 0 to 1")
    return Average(lambda mean, new, count: torch.lerp(mean, new, 1 - decay))


def swa() -> Average:
    """The plain average of all parameters seen (stochastic weight averaging).

    Agrees with `torch.optim.swa_utils.get_swa_multi_avg_fn`.

    Returns:
        An `Average`; see `ema`.

    Memory and time: as `ema`.

    Example:
        >>> import torch, pure_loopgrad as plg
        >>> average = plg.swa()
        >>> state = average.init(torch.tensor(0.0))
        >>> for w in (1.0, 5.0):
        ...     state = average.update(state, torch.tensor(w))
        >>> average.value(state)
        tensor(2.)

    Source: Izmailov et al., arXiv 1803.05407.
    """
    return Average(lambda mean, new, count: mean + (new - mean) / (count + 1))


def recompute_statistics(module: nn.Module, params: NamedTensors, batches: Iterable[Any]) -> NamedTensors:
    """The running statistics of a module's batch norms at averaged parameters, over some batches.

    Args:
        module: the module; it is not changed.
        params: names to parameters, as of `from_module`.
        batches: inputs of the module, or tuples that start with one.

    Returns:
        Names to buffers: `module.load_state_dict({**params, **buffers}, strict=False)` sets both.

    Memory: a copy of the module, one batch. Time: one forward for each batch.

    Example:
        >>> import torch, pure_loopgrad as plg
        >>> net = torch.nn.BatchNorm1d(1)
        >>> buffers = plg.recompute_statistics(net, plg.from_module(net)[1], [torch.tensor([[1.0], [3.0]])])
        >>> buffers["running_mean"], net.running_mean
        (tensor([2.]), tensor([0.]))
    """
    copied = copy.deepcopy(module)
    copied.load_state_dict({name: t.detach() for name, t in params.items()}, strict=False)
    update_bn(batches, copied)
    return {name: t.clone() for name, t in copied.named_buffers()}
