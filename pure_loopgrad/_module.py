"""A torch.nn.Module as a pure body and its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from pure_loopgrad import _effects, _tree
from pure_loopgrad._capture import unwatched
from pure_loopgrad._levels import is_batched
from pure_loopgrad.errors import LoopTypeError, LoopValueError

NamedTensors: TypeAlias = dict[str, Tensor]
Buffers = Literal["update", "frozen"]


def from_module(
    module: nn.Module, *, buffers: Buffers = "update"
) -> tuple[Callable[[NamedTensors, Any], Any], NamedTensors]:
    """Turns a module into `(body, params)`, so that `plg.map(*plg.from_module(net), xs)` is a loop over `net(x)`.

    The params are the live tensors of the module: after `loss.backward()` the gradients are in `net.weight.grad` as
    always, and an optimiser over `net.parameters()` needs no change. A tensor that two layers share stands there once.

    Args:
        module: any module; `module(x)` is one iteration.
        buffers: what becomes of the module's buffers.
            `"update"`: a module in train mode updates them as in a plain loop: once, in order, in the first pass. A
            recomputation works on copies of what the first pass found. They stay in the module.
            `"frozen"`: they stand among the params, as inputs without a gradient; what the module does to them is done
            to copies and dropped.

    Returns:
        body: `body(params, x)`, which is `module(x)` with the tensors of `params` in place of its own.
        params: a dict from names to the module's parameters, and its buffers if they are frozen.

    Raises:
        LoopTypeError: not a module, or one wrapped for data-parallel training (pass its `.module`).
        LoopValueError: when the body is called: under `torch.vmap` (a chunk size above 1), iterations cannot update
            running statistics one after the other. Nothing is changed then.

    Memory and time are those of the loop that runs the body. Buffers that change and are read in every iteration (the
    vectors of spectral norm, a codebook) are kept n times; running statistics are not, as train mode does not read
    them.

    Example:
        >>> import torch, pure_loopgrad as plg
        >>> net = torch.nn.Linear(3, 2)
        >>> body, params = plg.from_module(net)
        >>> sorted(params)
        ['bias', 'weight']
        >>> plg.map(body, params, torch.zeros(5, 3)).sum().backward()
        >>> net.bias.grad
        tensor([5., 5.])
    """
    _check(module)
    if buffers not in ("update", "frozen"):
        raise LoopValueError(f"buffers={buffers!r}: expected 'update' or 'frozen', or plg.from_stateful_module")
    named = _Named.of(module)
    if buffers == "update":
        return _Updating(named), named.parameters
    return _Frozen(named), {**named.parameters, **named.buffers}


def from_stateful_module(
    module: nn.Module,
) -> tuple[Callable[[NamedTensors, NamedTensors, Any], tuple[NamedTensors, Any]], NamedTensors, NamedTensors]:
    """Turns a module into `(body, params, buffers)` for `plg.scan`, which carries the buffers from x to x.

    The pure form of a module that changes its buffers: nothing is written into the module. To do so afterwards, use
    `module.load_state_dict(buffers, strict=False)`.

    Args:
        module: any module; `module(x)` is one iteration.

    Returns:
        body: `body(params, buffers, x) -> (buffers, y)`.
        params: a dict from names to the module's live parameters.
        buffers: a dict from names to copies of the module's buffers.

    Raises:
        LoopTypeError: see `from_module`.

    Memory and time are those of the loop that runs the body.

    Example:
        >>> import torch, pure_loopgrad as plg
        >>> body, params, buffers = plg.from_stateful_module(torch.nn.BatchNorm1d(2))
        >>> buffers, ys = plg.scan(body, params, buffers, torch.ones(4, 8, 2))
        >>> buffers["num_batches_tracked"]
        tensor(4)
    """
    _check(module)
    named = _Named.of(module)

    def body(params: NamedTensors, buffers: NamedTensors, x: Any) -> tuple[NamedTensors, Any]:
        return named.call(params, _copies(buffers, []), x)

    return body, named.parameters, _copies(named.buffers, [])


def _check(module: nn.Module) -> None:
    if not isinstance(module, nn.Module):
        raise LoopTypeError(f"expected a torch.nn.Module, not a {type(module).__name__}")
    if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise LoopTypeError(f"a module inside {type(module).__name__} cannot be a body: pass its .module")


@dataclass(frozen=True)
class _Named:
    """A module and the names of its tensors; a tensor with two names stands under one."""

    module: nn.Module
    parameters: NamedTensors
    buffers: NamedTensors
    slots: dict[str, str]  # for every place that holds a tensor, the name under which the tensor stands here

    @classmethod
    def of(cls, module: nn.Module) -> _Named:
        """Reads a module.

        `functional_call` ties tensors by itself, but then leaves a module that has one layer twice with the wrong
        tensors; so each layer is named once, and nothing is tied.
        """
        parameters: NamedTensors = {**dict(module.named_parameters())}
        buffers = dict(module.named_buffers())
        name_of = {id(t): name for name, t in [*parameters.items(), *buffers.items()]}
        slots: dict[str, str] = {}
        for prefix, layer in module.named_modules():
            tensors = [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]
            slots.update({f"{prefix}.{name}" if prefix else name: name_of[id(t)] for name, t in tensors})
        return cls(module, parameters, buffers, slots)

    def call(self, params: NamedTensors, buffers: NamedTensors, x: Any) -> tuple[NamedTensors, Any]:
        """`module(x)` with these tensors in place of its own, and what its buffers are afterwards."""
        tensors = {**params, **buffers}
        given = {slot: tensors[name] for slot, name in self.slots.items() if name in tensors}
        y = torch.func.functional_call(self.module, given, (x,), tie_weights=False)
        # functional_call leaves in `given` what the module has put in the place of a tensor
        return {name: given[slot] for slot, name in self.slots.items() if name in buffers}, y

    @property
    def may_change(self) -> bool:
        """Whether a call may write into buffers: there are some, and a layer is in train mode."""
        return bool(self.buffers) and any(layer.training for layer in self.module.modules())

    def running_statistics(self) -> set[str]:
        """Buffers that train mode writes and does not read, of layers in train mode."""
        return {
            self.slots[f"{prefix}.{name}" if prefix else name]
            for prefix, layer in self.module.named_modules()
            if layer.training and getattr(layer, "track_running_stats", False)
            for name, _ in layer.named_buffers(recurse=False)
        }


@dataclass(frozen=True, eq=False)
class _Frozen:
    """A body that keeps its buffers from changing."""

    named: _Named

    @property
    def identity(self) -> nn.Module:
        """What stays the same where `from_module` is called again."""
        return self.named.module

    def __call__(self, params: NamedTensors, x: Any) -> Any:
        buffers = {name: t.detach() for name, t in params.items() if name in self.named.buffers}
        if self.named.may_change:
            buffers = _copies(buffers, [*params.values(), *_tree.split(x)[0]])
        return self.named.call(params, buffers, x)[1]


@dataclass(frozen=True, eq=False)
class _Updating:
    """A body whose first pass updates the module's buffers."""

    named: _Named
    # one copy of each buffer for as long as it does not change, by name, with the version that it is a copy of
    held: dict[str, tuple[int, Tensor]] = field(default_factory=dict)

    @property
    def identity(self) -> nn.Module:
        """See `_Frozen`."""
        return self.named.module

    def __call__(self, params: NamedTensors, x: Any) -> Any:
        named = self.named
        if not named.may_change:
            return named.call(params, {}, x)[1]
        statistics = named.running_statistics()
        self._refuse_batches(statistics, [*params.values(), *_tree.split(x)[0]])
        with unwatched():
            start, counts = _effects.begin(self, lambda: self._found(named.buffers.keys() - statistics))
            copies = _copies({**named.buffers, **start}, [])
        after, y = named.call(params, copies, x)
        if counts:
            # batch_norm does not count its changes as others do
            changed = {n: t for n, t in after.items() if n in statistics or t is not copies[n] or t._version > 0}
            self._write(changed)
        else:
            _effects.rehearse(self, {name: after[name] for name in start})
        return y

    def _found(self, names: Iterable[str]) -> NamedTensors:
        for name in names:
            t = self.named.buffers[name]
            if name not in self.held or self.held[name][0] != t._version:
                self.held[name] = (t._version, t.detach().clone())
        return {name: self.held[name][1] for name in names}

    def _write(self, changed: NamedTensors) -> None:
        with unwatched(), torch.no_grad():
            for name, t in changed.items():
                self.named.buffers[name].copy_(torch.func.debug_unwrap(t))

    def _refuse_batches(self, statistics: set[str], tensors: Sequence[Tensor]) -> None:
        if statistics and any(map(is_batched, tensors)):
            raise LoopValueError(
                f"the module is in train mode and would update its buffer {min(statistics)!r} in every iteration, "
                f"which iterations under torch.vmap cannot do in order. Use chunk_size=1, or batched=True with "
                f"statistics over each chunk, or from_module(..., buffers='frozen'), or module.eval(), or a layer "
                f"without running statistics (GroupNorm)"
            )


def _copies(buffers: NamedTensors, inputs: Sequence[Tensor]) -> NamedTensors:
    """Copies that a module may write into; batched where the inputs are, as torch.vmap asks of such tensors."""
    like = next(filter(is_batched, inputs), None)
    if like is None:
        return {name: t.detach().clone() for name, t in buffers.items()}
    return {name: like.new_zeros(t.shape, dtype=t.dtype).copy_(t.detach()) for name, t in buffers.items()}
