"""A torch.nn.Module as a pure body and its parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import nn

from pure_loopgrad._buffers import copies
from pure_loopgrad._named import Named, NamedTensors
from pure_loopgrad._stateful import Carrying, Frozen, Updating
from pure_loopgrad.errors import LoopTypeError, LoopValueError

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
            `"update"`: the module updates them as in a plain loop: once, in order, in the first pass. A recomputation
            works on copies of what the first pass found. They stay in the module, and keep their shapes and dtypes.
            `"frozen"`: they stand among the params, as inputs without a gradient; what the module does to them is done
            to copies and dropped.

    Returns:
        body: `body(params, x)`, which is `module(x)` with the tensors of `params` in place of its own. A recomputation
            runs it in the mode, train or eval, of the first pass.
        params: a dict from names to the module's parameters, and its buffers if they are frozen.

    Raises:
        LoopTypeError: not a module, or one wrapped for data-parallel training (pass its `.module`). When the body is
            called: a buffer gets another shape or dtype.
        LoopValueError: when the body is called: under `torch.vmap` (a chunk size above 1), iterations cannot update
            buffers one after the other; nothing is changed then. Or gradient would flow through a buffer from one
            iteration or one call to the next, also of another module that has the buffer, which
            `from_stateful_module` can; found in the backward. Or a buffer is None.
        ImpureBodyError: when the body is called: a module in eval mode writes into a buffer in place.

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
    named = Named.of(module)
    if buffers == "update":
        return Updating(named), named.parameters
    return Frozen(named), {**named.parameters, **named.buffers}


def from_stateful_module(
    module: nn.Module,
) -> tuple[Callable[[NamedTensors, NamedTensors, Any], tuple[NamedTensors, Any]], NamedTensors, NamedTensors]:
    """Turns a module into `(body, params, buffers)` for `plg.scan`, which carries the buffers from x to x.

    The pure form of a module that changes its buffers: nothing is written into the module. To do so afterwards, use
    `module.load_state_dict(buffers, strict=False)`. Gradient flows through those buffers through which it does in the
    plain loop; which they are is found by calling the module on tensors without data, once in a loop.

    Args:
        module: any module; `module(x)` is one iteration.

    Returns:
        body: `body(params, buffers, x) -> (buffers, y)`.
        params: a dict from names to the module's live parameters.
        buffers: a dict from names to copies of the module's buffers.

    Raises:
        LoopTypeError: not a module; see `from_module`.
        LoopValueError: when the body is called: a buffer is None at first.
        ImpureBodyError: when the body is called: a buffer passes gradient on, and did not in the first call of
            the loop.

    Memory and time are those of the loop that runs the body.

    Example:
        >>> import torch, pure_loopgrad as plg
        >>> body, params, buffers = plg.from_stateful_module(torch.nn.BatchNorm1d(2))
        >>> buffers, ys = plg.scan(body, params, buffers, torch.ones(4, 8, 2))
        >>> buffers["num_batches_tracked"]
        tensor(4)
    """
    _check(module)
    named = Named.of(module)
    return Carrying(named), named.parameters, copies(named.buffers)


def _check(module: nn.Module) -> None:
    if not isinstance(module, nn.Module):
        raise LoopTypeError(f"expected a torch.nn.Module, not a {type(module).__name__}")
    if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise LoopTypeError(f"a module inside {type(module).__name__} cannot be a body: pass its .module")
