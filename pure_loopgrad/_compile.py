"""The parts of a loop that run again and again, compiled: dynamo sees each as one function of a body and of tensors.

The first chunk of a pass runs as it is, where it is checked. It also shows what the body returns, and whether it draws
random numbers or has effects: such a body is never compiled, since a compiler is free to leave a draw out that one pass
needs and another does not. What a body reads beside its arguments is under dynamo's guards: a value that has changed
compiles anew.
"""

from __future__ import annotations

import functools
import inspect
import types
import warnings
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias, cast
from weakref import WeakKeyDictionary

import torch

from pure_loopgrad._body import ChunkBody
from pure_loopgrad._identity import identity_of
from pure_loopgrad._levels import active_levels
from pure_loopgrad._run import Compile
from pure_loopgrad._trace import Trace
from pure_loopgrad._user import Tensors, Terms, UserBody

Function: TypeAlias = Callable[..., Any]
RunChunk: TypeAlias = "Callable[[Tensors, Tensors], tuple[Terms, Terms]]"


@dataclass
class Entry:
    """One function, compiled for one kind of use of one body; `broken` once that has failed."""

    run: Function
    broken: bool = False


# By the body's code or its module, so that a closure made anew in each step finds what an earlier one compiled, and no
# entry outlives them; then by the kind of use and the compiler. Dynamo keeps the code of all that it has traced for
# ever, so the number of bodies is limited too.
_entries: WeakKeyDictionary[Any, dict[tuple[Hashable, Compile], Entry]] = WeakKeyDictionary()
MAX_BODIES = 256


def compiled(user: Function, kind: Hashable, compile_: Compile, fn: Function, *args: Any) -> Any:
    """`fn(*args)` by code that was compiled for this use of the user's function; as it is where that fails."""
    try:
        entry = _entry(user, kind, compile_)
        if not entry.broken:
            return entry.run(fn, *args)
    except Exception as error:
        found = fn(*args)  # an error of the user's own is raised here once more, and better explained
        _give_up(user, kind, compile_, f"{type(error).__name__}: {' '.join(str(error).splitlines()[:2])}")
        return found
    return fn(*args)


def chunk_runner(body: ChunkBody, trace: Trace) -> RunChunk:
    """The body of a loop, running compiled where that is possible."""
    user, kind = _layers(body) if trace.compile is not False else (None, ())
    return body if user is None else functools.partial(run_compiled, user, kind, body)


def run_compiled(user: UserBody, kind: Hashable, fn: Function, *args: Any) -> Any:
    """`fn(*args)`, which calls the user's body, compiled where that is possible here and now."""
    trace = user.trace
    if not _may_compile(user):
        return fn(*args)
    assert trace.outputs is not None
    if not all(skeleton.template.is_plain for skeleton in (*user.args, trace.outputs)):
        _give_up(user.fn, kind, trace.compile, "there is a container other than tuples, named tuples, lists and dicts")
        return fn(*args)
    with nullcontext() if trace.settled else trace.ambient.restored():
        return compiled(user.fn, kind, trace.compile, fn, *args)


def _may_compile(user: UserBody) -> bool:
    trace = user.trace
    if trace.compile is False or trace.outputs is None or trace.checking or trace.debug_nonfinite:
        return False
    return trace.repeats and active_levels() == 0


def _call(fn: Function, *args: Any) -> Any:
    """What dynamo is given, with everything that it compiles for as an argument."""
    return fn(*args)


def _layers(body: Any) -> tuple[UserBody | None, Hashable]:
    """The user's body below derivatives, or None where it is no chunk; and all that stands above it."""
    kind: list[Any] = []
    while not isinstance(body, UserBody):
        kind += [type(body), *(value for name, value in vars(body).items() if name not in ("base", "body", "missing"))]
        body = getattr(body, "base", None) or getattr(body, "body", None)
        if body is None:
            return None, ()
    return body, (*kind, type(body.fn))


def _entry(user: Function, kind: Hashable, compile_: Compile) -> Entry:
    entries = _entries_of(user)
    if (kind, compile_) not in entries:
        # dynamo counts recompilations by code object, so each entry has one of its own
        own = types.FunctionType(_call.__code__.replace(), _call.__globals__)
        make = _inductor if compile_ is True else compile_
        entries[kind, compile_] = Entry(cast(Any, make)(own))
    return entries[kind, compile_]


def _entries_of(user: Function) -> dict[tuple[Hashable, Compile], Entry]:
    key = identity_of(user)
    if key not in _entries and len(_entries) >= MAX_BODIES:
        del _entries[next(iter(_entries))]  # the oldest
    return _entries.setdefault(key, {})


def _inductor(fn: Function) -> Function:
    options: dict[str, Any] = {"fallback_random": True, "guard_filter_fn": _guards_of_the_user}
    return torch.compile(fn, fullgraph=True, options=options)


def _guards_of_the_user(entries: Sequence[Any]) -> list[bool]:
    """Leaves out the guards on globals of this library and of Python, a third of the time of a small chunk."""
    ours = ("G['__import_pure_loopgrad", "G['__builtins_dict")
    return [not (entry.is_global and entry.name.startswith(ours)) for entry in entries]


def _give_up(user: Function, kind: Hashable, compile_: Compile, reason: str) -> None:
    """Notes that this cannot be compiled, and says so once."""
    entries = _entries_of(user)
    said = any(entry.broken for (_, by), entry in entries.items() if by == compile_)
    entries[kind, compile_] = Entry(user, broken=True)
    if said:
        return
    name = getattr(inspect.unwrap(user), "__name__", type(user).__name__)
    warnings.warn(f"{name} cannot be compiled and runs as it is: {reason}", RuntimeWarning, stacklevel=2)
