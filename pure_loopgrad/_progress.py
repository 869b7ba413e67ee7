"""Progress bars, by tqdm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from pure_loopgrad.errors import LoopValueError

Progress: TypeAlias = Callable[[int, int, str], object]


def reporter() -> Progress:
    """A function that shows one bar for each pass.

    Raises:
        LoopValueError: tqdm is not installed.
    """
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]  # has no types; imported here, as it is optional
    except ModuleNotFoundError:
        raise LoopValueError(
            "progress=True shows bars with tqdm, which is not installed: pip install 'pure_loopgrad[progress]', or "
            "give a function of (done, n, what)"
        ) from None
    bars: dict[str, Any] = {}

    def report(done: int, n: int, what: str) -> None:
        bar = bars.get(what) or bars.setdefault(what, tqdm(total=n, desc=what))
        bar.update(done - bar.n)
        if done == n:
            bars.pop(what).close()

    return report
