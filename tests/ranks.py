"""Real processes of a gloo group on this machine."""

from __future__ import annotations

import datetime
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

DEADLINE = 90  # seconds
TIMEOUT = datetime.timedelta(seconds=40)


def on_ranks(world: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """What `fn(rank, *args)` returns in each of `world` processes; an exception as a string. None where one died."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        processes = [
            context.Process(target=_child, args=(rank, world, folder, fn, args), daemon=True) for rank in range(world)
        ]
        for process in processes:
            process.start()
        end = time.monotonic() + DEADLINE
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        for process in processes:
            process.kill()  # those that hang; their results are missing
        paths = [Path(folder, f"result{rank}") for rank in range(world)]
        return [torch.load(p, weights_only=False) if p.exists() else None for p in paths]


def _child(rank: int, world: int, folder: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "store")), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    try:
        found = fn(rank, *args)
    except Exception:
        found = traceback.format_exc()
    torch.save(found, Path(folder, f"result{rank}.part"))
    Path(folder, f"result{rank}.part").rename(Path(folder, f"result{rank}"))
