"""What stays the same where a function is made anew: the key by which something is kept for it."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any


def identity_of(fn: Callable[..., Any]) -> Any:
    """The code of a function below wrappers, partials and methods, the module of a body from `from_module`, or itself.

    What it returns can be hashed and referred to weakly; for an object that cannot, it is its type.
    """
    found: Any = inspect.unwrap(fn)
    while isinstance(found, functools.partial):
        found = inspect.unwrap(found.func)
    found = getattr(found, "identity", getattr(found, "__func__", found))
    found = getattr(found, "__code__", found)
    try:
        hash(weakref.ref(found))
    except TypeError:
        return type(found)
    return found
