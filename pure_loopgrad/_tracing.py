"""Whether operations are being recorded into a graph by make_fx, which torch.func.linearize and torch.export use."""

from __future__ import annotations

import torch


def is_traced() -> bool:
    """Whether what runs here is recorded. Such a graph may lose what is written into a part of a buffer, and does in
    torch.func.linearize, whose folding of constants takes such a write for dead code.

    Private names of torch: the public functions know of torch.compile and torch.export only, and
    torch.fx.experimental.proxy_tensor is slow to import. tests/test_private_torch.py says so if they move.
    """
    proxy, functional = torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FUNCTIONAL
    if torch._C._get_dispatch_mode(proxy) is not None or torch._C._get_dispatch_mode(functional) is not None:
        return True
    return torch._ops._get_dispatch_mode_pre_dispatch(proxy) is not None  # type: ignore[no-untyped-call]  # so in torch
