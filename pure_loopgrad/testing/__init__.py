"""Tools to hold loops against the plain Python loop: strategies for hypothesis, and assertions for one's own bodies.

A test of a body of one's own::

    from pure_loopgrad import testing

    def test_body():
        testing.assert_pure(body, params, xs)
        testing.assert_matches_full_graph(body, params, xs, loss)
        testing.assert_memory_independent_of_n(body, params, xs, reduce="mean")

The strategies need the extra `test`.
"""

from __future__ import annotations

from pure_loopgrad.testing.assertions import assert_matches_full_graph as assert_matches_full_graph
from pure_loopgrad.testing.assertions import assert_scan_matches_full_graph as assert_scan_matches_full_graph
from pure_loopgrad.testing.comparing import assert_close as assert_close
from pure_loopgrad.testing.counting import assert_memory_independent_of_n as assert_memory_independent_of_n
from pure_loopgrad.testing.counting import compare as compare
from pure_loopgrad.testing.counting import count_calls as count_calls
from pure_loopgrad.testing.counting import peak_bytes as peak_bytes
from pure_loopgrad.testing.counting import saved_bytes as saved_bytes
from pure_loopgrad.testing.gradients import assert_same_gradient as assert_same_gradient
from pure_loopgrad.testing.plain import plain_map as plain_map
from pure_loopgrad.testing.plain import plain_mean as plain_mean
from pure_loopgrad.testing.plain import plain_scan as plain_scan
from pure_loopgrad.testing.plain import plain_sum as plain_sum
from pure_loopgrad.testing.purity import assert_pure as assert_pure
from pure_loopgrad.testing.strategies import bodies as bodies
from pure_loopgrad.testing.strategies import chunk_sizes as chunk_sizes
from pure_loopgrad.testing.strategies import loops as loops
from pure_loopgrad.testing.strategies import losses as losses
from pure_loopgrad.testing.strategies import params as params
from pure_loopgrad.testing.strategies import pytrees as pytrees
from pure_loopgrad.testing.strategies import schedules as schedules
from pure_loopgrad.testing.strategies import transform_stacks as transform_stacks
from pure_loopgrad.testing.transforms import transformed as transformed
