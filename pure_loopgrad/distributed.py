"""Loops whose iterations are spread over the processes of a torch.distributed group.

Each rank holds its own part of xs, of any length, also none; params are the same on all. Every function returns on
every rank what one process would return for all iterations, in the order of the ranks: no factor of the number of ranks
is left to anybody. All ranks call the same functions in the same order, and, where they differentiate, compute the same
loss of the results.
"""

from __future__ import annotations

from pure_loopgrad._sharded_grad import value_and_grad as value_and_grad
from pure_loopgrad._sharded_map import map as map
from pure_loopgrad._sharded_map import mean as mean
from pure_loopgrad._sharded_map import shard as shard
from pure_loopgrad._sharded_map import sum as sum
