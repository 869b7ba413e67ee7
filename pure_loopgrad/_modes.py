"""Modes that see every operation of a block, and leave the compiler as it is.

A dispatch mode has two effects on torch.compile that nobody asks for. To keep dynamo out of its own handler, torch
loads the compiler at the handler's first call, which takes a second. And a compiled function that is called under a
mode runs as it is, not only then: dynamo gives its code up for good.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode  # the public way, in spite of its name

if TYPE_CHECKING:
    from typing_extensions import Self


class _Handler:
    """Stands before torch's class, which wraps what a class of its own defines, and not what that class inherits."""

    handle: Callable[[Any, Any, Any, dict[str, Any]], Any]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.handle(func, types, args, kwargs or {})


class OperationMode(_Handler, TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """A dispatch mode whose subclasses define `handle(func, types, args, kwargs)`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]  # the same

    def __new__(cls, *_: Any) -> Self:
        return cast("Self", object.__new__(_beside_dynamo(cast(Any, cls)) if "torch._dynamo" in sys.modules else cls))

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # the same

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]  # the same
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # the same

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions stay compiled, and the mode sees what they run of torch's own operations."""
        return True


@functools.cache
def _beside_dynamo(cls: Any) -> type[OperationMode]:
    """A class whose handler torch wraps, so that dynamo does not compile it."""
    return type(cls.__name__, (cls,), {"__torch_dispatch__": cls.__torch_dispatch__})


def compiled_run_eagerly() -> AbstractContextManager[None]:
    """A block in which functions that the user has compiled run as they were written, and stay compiled after it."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and to ask would load the compiler
        return nullcontext()
    return cast("AbstractContextManager[None]", torch.compiler.set_stance("force_eager"))
