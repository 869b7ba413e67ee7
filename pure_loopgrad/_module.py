"""A torch.nn.Module as a pure body and its parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from pure_loopgrad.errors import LoopTypeError, LoopValueError

NamedTensors: TypeAlias = dict[str, Tensor]


def from_module(module: nn.Module) -> tuple[Callable[[NamedTensors, Any], Any], NamedTensors]:
    """Turns a module into `(body, params)`, so that `plg.map(*plg.from_module(net), xs)` is a loop over `net(x)`.

    The params are the live tensors of the module: after `loss.backward()` the gradients are in `net.weight.grad` as
    always, and an optimiser over `net.parameters()` needs no change. Buffers stand among them, as inputs without a
    gradient. A parameter that two layers share stands there once.

    Args:
        module: any module; `module(x)` is one iteration.

    Returns:
        body: `body(params, x)`, which is `module(x)` with the tensors of `params` in place of its own.
        params: a dict from names to the module's parameters and buffers.

    Raises:
        LoopTypeError: not a module, or one wrapped for data-parallel training (pass its `.module`).
        LoopValueError: when the body is called and a layer would update its running statistics.

    Memory and time are those of the loop that runs the body.

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
    if not isinstance(module, nn.Module):
        raise LoopTypeError(f"from_module takes a torch.nn.Module, not a {type(module).__name__}")
    if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise LoopTypeError(f"from_module cannot take a module inside {type(module).__name__}: pass its .module")
    params: NamedTensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    buffers = {name for name, _ in module.named_buffers()}
    names = _names_of_slots(module, params)
    tracking = {name: m for name, m in module.named_modules() if getattr(m, "track_running_stats", False)}

    def body(params: NamedTensors, x: Any) -> Any:
        _refuse_running_statistics(tracking)
        given = {name: t.detach() if name in buffers else t for name, t in params.items()}
        tensors = {slot: given[name] for slot, name in names.items()}
        return torch.func.functional_call(module, tensors, (x,), tie_weights=False)

    return body, params


def _names_of_slots(module: nn.Module, params: NamedTensors) -> dict[str, str]:
    """For every place in the module that holds a tensor, the name under which the tensor stands in params.

    A tensor may be in two layers, and a layer in the module twice. `functional_call` ties the former by itself, but
    then leaves the module with the wrong tensors in the latter case, so each layer is named once, and nothing is tied.
    """
    name_of = {id(t): name for name, t in params.items()}
    slots: dict[str, str] = {}
    for prefix, layer in module.named_modules():
        tensors = [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]
        slots.update({f"{prefix}.{name}" if prefix else name: name_of[id(t)] for name, t in tensors})
    return slots


def _refuse_running_statistics(layers: dict[str, nn.Module]) -> None:
    """A recomputation would update them a second time."""
    for name, layer in layers.items():
        if layer.training:
            raise LoopValueError(
                f"layer {name or 'module'} ({type(layer).__name__}) is in train mode and would update its running "
                f"statistics in every pass. Put it in eval mode, make it with track_running_stats=False, or use a "
                f"layer without them (GroupNorm)"
            )
