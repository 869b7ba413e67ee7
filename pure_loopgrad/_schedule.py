"""Which carries of a loop are kept: pure functions on integers.

A loop of n steps is run once forward, and then walked backward. `spine` says how a segment is cut while it runs: into
parts, each of which keeps only the carry that it starts from and is run again, cut by its own plan, when the backward
reaches it. The last part is always a single step, whose backward follows at once.

    "all"     every step is a part: each carry is kept, each step run again once
    "sqrt"    segments of about sqrt(n) steps: 2 sqrt(n) carries, each step run again at most twice
    k         at most k carries at any time, the first one included: binomial parts, which cost the fewest steps

Source of the last: Griewank and Walther, Algorithm 799: revolve, ACM TOMS 26 (2000).
"""

from __future__ import annotations

from math import comb, isqrt
from typing import Literal, TypeAlias

from pure_loopgrad.errors import LoopTypeError, LoopValueError

Plan: TypeAlias = "Literal['all', 'sqrt'] | int"
Part = tuple[int, Plan]  # a number of steps, and how they are cut when they run again


def check_plan(plan: Plan) -> Plan:
    """Refuses what is no plan.

    Raises:
        LoopTypeError: neither a word nor an int.
        LoopValueError: another word, or less than 1 carry.
    """
    if isinstance(plan, bool) or not isinstance(plan, (str, int)):
        raise LoopTypeError(f"checkpoints={plan!r}: expected 'all', 'sqrt' or a number of carries to keep")
    if isinstance(plan, str) and plan not in ("all", "sqrt"):
        raise LoopValueError(f"checkpoints={plan!r}: expected 'all', 'sqrt' or a number of carries to keep")
    if isinstance(plan, int) and plan < 1:
        raise LoopValueError(f"checkpoints={plan}: at least the first carry must be kept, so expected at least 1")
    return plan


def spine(n: int, plan: Plan) -> list[Part]:
    """The parts of a segment of n >= 1 steps, in order; the last is a single step."""
    if plan == "all":
        return [(1, 1)] * n
    if plan == "sqrt":
        size = max(1, isqrt(n - 1) + 1)
        whole = (n - 1) // size
        segment: Part = (size, "all")
        return [segment] * whole + [(1, 1)] * (n - whole * size)
    parts: list[Part] = []
    carries = int(plan)
    while n > 1:
        first = first_part(n, carries)
        parts.append((first, carries))
        n, carries = n - first, carries - 1
    return [*parts, (1, 1)]


def first_part(n: int, carries: int) -> int:
    """How many of n > 1 steps the first of two binomial parts takes, so that the whole takes `advances(n, carries)`.

    With r repetitions, `comb(k + r, k)` steps can be walked backward in k carries. Of the n steps, the second part has
    a carry less and the first a repetition less, so each is bounded; any cut within both bounds is optimal.
    """
    if carries == 1:
        return n - 1
    r = repetitions(n, carries)
    least_second = comb(carries + r - 2, carries - 1)  # what the second part could do with a repetition less
    most_first = comb(carries + r - 1, carries)
    return min(most_first, n - least_second)


def repetitions(n: int, carries: int) -> int:
    """The least r with n <= comb(carries + r, carries): how often a step is run forward at most, less one."""
    r = 0
    while comb(carries + r, carries) < n:
        r += 1
    return r


def advances(n: int, carries: int) -> int:
    """The fewest steps to run beside those whose backward follows: t(n, k) = min_m m + t(n - m, k - 1) + t(m, k)."""
    r = repetitions(n, carries)
    return r * n - comb(carries + r, carries + 1)


def enough_carries(n: int, carries: int, deepest: int) -> int:
    """`carries`, or as many more as it takes for at most `deepest` repetitions."""
    while repetitions(n, carries) > deepest:
        carries += 1
    return carries
