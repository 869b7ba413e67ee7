"""The main job's training with its iterations spread over processes that torchrun has started."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pure_loopgrad import distributed
from pure_loopgrad.demo.config import Config
from pure_loopgrad.demo.methods import flat, ours
from pure_loopgrad.demo.model import body, criterion, init_params
from pure_loopgrad.demo.problem import make_problem
from pure_loopgrad.demo.training import nothing, train


@dataclass(frozen=True)
class Sharded:
    """What the ranks found together."""

    ranks: int
    iterations: list[int]  # of each rank
    losses: list[float]
    seconds: float  # a training step
    error: float  # of the first gradient, relative to that of one process

    def __str__(self) -> str:
        """For people."""
        return (
            f"{self.ranks} processes with {', '.join(map(str, self.iterations))} iterations; "
            f"loss {self.losses[0]:.4g} to {self.losses[-1]:.4g} in {len(self.losses)} steps of {self.seconds:.2f} s; "
            f"the gradient differs from that of one process by {self.error:.1e}"
        )


def run_sharded(config: Config) -> Sharded | None:
    """Trains over all ranks, and compares the first gradient; returns what was found on rank 0."""
    dist.init_process_group("gloo")
    try:
        problem, rank, world = make_problem(config), dist.get_rank(), dist.get_world_size()
        xs = distributed.shard(problem.xs)
        f = distributed.value_and_grad(body(problem), criterion(problem), chunk_size=config.chunk_size)
        params = init_params(config, problem)
        _, grads = f(params, xs)
        start = time.perf_counter()
        trained = train(config, problem, nothing, lambda params: f(params, xs))
        seconds = (time.perf_counter() - start) / config.steps
        if rank > 0:
            return None
        found, alone = flat(grads), flat(ours(config, problem)(params)[1])
        counts = [len(part) for part in torch.tensor_split(torch.arange(problem.n), world)]
        error = ((found - alone).norm() / alone.norm()).item()
        return Sharded(world, counts, trained.losses, seconds, error)
    finally:
        dist.destroy_process_group()
