"""A real recording: reads and checks a full-matrix capture in MATLAB's format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.io import loadmat  # type: ignore[import-untyped]  # scipy has no types of its own
from scipy.signal import hilbert  # type: ignore[import-untyped]  # the same
from torch import Tensor

from pure_loopgrad.demo.config import InputError

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Recording:
    """Traces from every transmitter to every receiver.

    Attributes:
        traces: (n, 2, n, T) by transmitter: the real and imaginary part of the analytic signal, receiver, time.
        elements: (n,) positions in m.
        dt: sampling interval in s.
        velocity: the speed of sound that the recording names, in m/s.
        start: time of the first sample after the transmission, in s.
    """

    traces: Tensor
    elements: Tensor
    dt: float
    velocity: float
    start: float = 0.0


def read_recording(path: str) -> Recording:
    """Reads the struct `exp_data` (time_data, tx, rx, time, ph_velocity, array.el_xc); half matrices are completed.

    Raises:
        InputError: no such file, another format, missing fields, sizes that disagree, values that are not finite, a
            pair of elements without a trace, or times that are not evenly spaced.
    """
    data = _load(path)
    try:
        samples, time = np.atleast_2d(_numbers(data.time_data, "time_data")), _numbers(data.time, "time")
        tx, rx = _numbers(data.tx, "tx").astype(int) - 1, _numbers(data.rx, "rx").astype(int) - 1
        elements, velocity = _numbers(data.array.el_xc, "array.el_xc"), _numbers(data.ph_velocity, "ph_velocity")
        _check_sizes(samples, tx, rx, time, elements)
        _check_values(samples, time, velocity)
        matrix = _full_matrix(samples, tx, rx, len(elements))
    except AttributeError as error:
        raise InputError(f"{path}: exp_data lacks a field: {error}") from None
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    analytic = hilbert(matrix, axis=-1)
    traces = torch.from_numpy(np.stack([analytic.real, analytic.imag], 1)).float()
    dt, start = float(time[-1] - time[0]) / (len(time) - 1), float(time[0])
    return Recording(traces, torch.from_numpy(elements).float(), dt, float(velocity[0]), start)


def _load(path: str) -> Any:
    if not Path(path).is_file():
        raise InputError(f"{path}: no such file")
    try:
        contents = loadmat(path, squeeze_me=True, struct_as_record=False)
    except Exception as error:  # scipy raises many kinds for a file that is no .mat, and each means just that
        raise InputError(f"{path}: not a MATLAB file that scipy can read ({type(error).__name__})") from None
    if not hasattr(contents.get("exp_data"), "_fieldnames"):
        raise InputError(f"{path}: holds no struct exp_data")
    return contents["exp_data"]


def _numbers(value: Any, name: str) -> Numbers:
    array = np.atleast_1d(np.asarray(value))
    if array.dtype.kind not in "iuf":  # complex samples, text, cells
        raise InputError(f"{name} is not an array of real numbers")
    if not np.isfinite(array).all():
        raise InputError(f"{name} has values that are not finite")
    return array.astype(np.float64)


def _check_sizes(samples: Numbers, tx: Any, rx: Any, time: Numbers, elements: Numbers) -> None:
    n = len(elements)
    if elements.ndim > 1 or n < 2 or time.ndim > 1 or len(time) < 2:
        raise InputError(f"array.el_xc is {elements.shape} and time is {time.shape}; expected vectors of at least 2")
    if not len(tx) or tx.ndim > 1 or tx.shape != rx.shape or samples.shape != (len(time), len(tx)):
        raise InputError(f"time_data is {samples.shape}, but time is {time.shape}, tx {tx.shape} and rx {rx.shape}")
    if min(tx.min(), rx.min()) < 0 or max(tx.max(), rx.max()) >= n:
        raise InputError(f"tx or rx name an element beyond 1..{n}")


def _check_values(samples: Numbers, time: Numbers, velocity: Numbers) -> None:
    if not samples.any():
        raise InputError("time_data is zero everywhere")
    steps = np.diff(time)
    if not (steps > 0).all() or np.ptp(steps) > 0.01 * steps.mean():
        raise InputError("time is not evenly spaced and rising")
    if velocity.size != 1 or velocity[0] <= 0:
        raise InputError(f"ph_velocity is {velocity.tolist()}; expected one positive number")


def _full_matrix(samples: Numbers, tx: Any, rx: Any, n: int) -> Numbers:
    """(n, n, T) by transmitter and receiver; what is missing of a half matrix is the same path the other way round."""
    known = np.zeros((n, n), dtype=bool)
    known[tx, rx] = known[rx, tx] = True
    if not known.all():
        t, r = np.argwhere(~known)[0] + 1
        raise InputError(f"there is no trace between elements {t} and {r}")
    matrix = np.zeros((n, n, len(samples)))
    matrix[rx, tx] = samples.T
    matrix[tx, rx] = samples.T
    return matrix
