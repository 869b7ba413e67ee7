"""A real recording: reads and checks a full-matrix capture in MATLAB's format."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.io import loadmat  # type: ignore[import-untyped]  # scipy has no types of its own
from scipy.signal import hilbert  # type: ignore[import-untyped]  # the same
from torch import Tensor

from pure_loopgrad.demo.config import InputError


@dataclass(frozen=True)
class Recording:
    """Traces from every transmitter to every receiver.

    Attributes:
        traces: (n, 2, n, T) by transmitter: the real and imaginary part of the analytic signal, receiver, time.
        elements: (n,) positions in m.
        dt: sampling interval in s.
        velocity: the speed of sound that the recording names, in m/s.
    """

    traces: Tensor
    elements: Tensor
    dt: float
    velocity: float


def read_recording(path: str) -> Recording:
    """Reads the struct `exp_data` (time_data, tx, rx, time, ph_velocity, array.el_xc); half matrices are completed.

    Raises:
        InputError: no such file, another format, missing fields, sizes that disagree, or values that are not finite.
    """
    data = _load(path)
    try:
        samples = np.atleast_2d(np.asarray(data.time_data, dtype=np.float64))
        tx, rx = (np.atleast_1d(np.asarray(v)).astype(int) - 1 for v in (data.tx, data.rx))
        time = np.atleast_1d(np.asarray(data.time, dtype=np.float64))
        elements = np.atleast_1d(np.asarray(data.array.el_xc, dtype=np.float64))
        velocity = float(data.ph_velocity)
    except AttributeError as error:
        raise InputError(f"{path}: exp_data lacks a field: {error}") from None
    except (TypeError, ValueError) as error:
        raise InputError(f"{path}: a field of exp_data is not numeric: {error}") from None
    _check(path, samples, tx, rx, time, elements, velocity)
    n = len(elements)
    matrix = np.zeros((n, n, len(time)))
    matrix[rx, tx] = samples.T  # reciprocity: what is missing of a half matrix is the same path the other way round
    matrix[tx, rx] = samples.T
    analytic = hilbert(matrix, axis=-1)
    traces = torch.from_numpy(np.stack([analytic.real, analytic.imag], 1)).float()
    return Recording(traces, torch.from_numpy(elements).float(), float(time[1] - time[0]), velocity)


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


def _check(
    path: str, samples: Any, tx: Any, rx: Any, time: Any, elements: Any, velocity: float
) -> None:  # arrays of numpy, which need no finer type here
    n = len(elements)
    if n < 2 or len(time) < 2:
        raise InputError(f"{path}: {n} elements and {len(time)} samples; expected at least 2 of each")
    if samples.shape != (len(time), len(tx)) or len(tx) != len(rx):
        raise InputError(
            f"{path}: time_data is {samples.shape}, but there are {len(time)} times, {len(tx)} tx and {len(rx)} rx"
        )
    if tx.min() < 0 or rx.min() < 0 or tx.max() >= n or rx.max() >= n:
        raise InputError(f"{path}: tx or rx name an element beyond 1..{n}")
    if not all(np.isfinite(v).all() for v in (samples, time, elements)):
        raise InputError(f"{path}: time_data, time or el_xc has values that are not finite")
    if not (math.isfinite(velocity) and velocity > 0 and time[1] > time[0]):
        raise InputError(f"{path}: ph_velocity {velocity} and the sampling interval must be positive")
