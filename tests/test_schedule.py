"""Schedules: optimal, legal on an abstract machine, and equal to a second oracle."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pure_loopgrad._schedule import advances, check_plan, enough_carries, repetitions, spine

PLANS = st.one_of(st.sampled_from(["all", "sqrt"]), st.integers(1, 62))


@cache
def optimum(n: int, k: int) -> int:
    """t(n, k) by its definition, tried out."""
    if n <= 1:
        return 0
    if k == 1:
        return n * (n - 1) // 2
    return min(m + optimum(n - m, k - 1) + optimum(m, k) for m in range(1, n))


class Machine:
    """Walks a loop backward as the schedule says; knows only which carries it holds, and checks every action."""

    def __init__(self, n, plan):
        self.n, self.ran, self.walked, self.most = n, 0, [], 0
        self.held = [0]
        self.order = []
        self.back(0, n, plan)

    def back(self, start, length, plan):
        assert self.held[-1] == start, "a part starts from the carry that was kept last"
        position = start
        inside = []
        *parts, last = spine(length, plan)
        for size, inner in parts:
            if position != start:
                self.held.append(position)
            inside.append((position, size, inner))
            self.order += range(position, position + size)
            self.ran += size
            position += size
        self.most = max(self.most, len(self.held))
        assert last[0] == 1
        self.walked.append(position)  # the step at which the run has arrived: its carry is at hand, not kept
        for position, size, inner in reversed(inside):
            if size == 1:
                self.walked.append(position)
            else:
                self.back(position, size, inner)
            if position != start:
                assert self.held.pop() == position


@given(st.integers(1, 60), PLANS)
def test_every_action_is_legal_and_every_step_is_walked_once(n, plan):
    machine = Machine(n, plan)
    assert machine.walked == list(range(n))[::-1]
    assert machine.held == [0]
    if plan == "all":
        assert (machine.ran, machine.most) == (n - 1, max(1, n - 1))
    elif plan == "sqrt":
        assert machine.ran <= 2 * n
        assert machine.most <= int(2 * n**0.5) + 1
    else:
        assert machine.ran == optimum(n, plan)
        assert machine.most <= plan


@pytest.mark.parametrize("n", range(1, 61))
def test_the_closed_form_is_the_optimum(n):
    assert [advances(n, k) for k in range(1, n + 3)] == [optimum(n, k) for k in range(1, n + 3)]


KNOWN = {(10, 1): 45, (10, 2): 20, (10, 3): 15, (10, 4): 14, (100, 6): 280, (1000, 10): 3636}


@pytest.mark.parametrize("case", KNOWN)
def test_known_numbers_of_advances(case):
    assert advances(*case) == KNOWN[case]
    assert Machine(*case).ran == KNOWN[case]


def test_sqrt_of_a_thousand():
    machine = Machine(1000, "sqrt")
    assert machine.most <= 64  # ceil(2 sqrt(1000))
    assert machine.ran <= 2000


ORDER = {
    (1, 1): [],
    (2, 1): [0],
    (3, 1): [0, 1, 0],
    (4, 2): [0, 1, 2, 0],
    (5, 5): [0, 1, 2, 3],
    (4, "all"): [0, 1, 2],
    (5, "sqrt"): [0, 1, 2, 3, 0, 1],
}


@pytest.mark.parametrize("case", ORDER)
def test_the_order_of_the_steps_that_are_run(case):
    assert Machine(*case).order == ORDER[case]


def test_a_second_oracle():
    schedules = pytest.importorskip("checkpoint_schedules", reason="a test dependency that may be missing")
    for n, k in [(5, 2), (10, 3), (23, 4), (50, 7), (60, 1)]:
        ran = 0
        for action in schedules.Revolve(n, k):
            if isinstance(action, schedules.Forward):
                ran += action.n1 - action.n0
            if isinstance(action, schedules.EndReverse):
                break
        # it counts the forward run before each backward step, which we count as that step's own
        assert ran - n == advances(n, k)


def test_more_carries_where_parts_would_nest_too_deep():
    assert enough_carries(60, 1, 12) > 1
    assert repetitions(60, enough_carries(60, 1, 12)) <= 12
    assert enough_carries(1000, 10, 12) == 10


@pytest.mark.parametrize("plan", ["none", 0, -1, 2.5, True, None])
def test_what_is_no_plan(plan):
    with pytest.raises((ValueError, TypeError), match="checkpoints="):
        check_plan(plan)
