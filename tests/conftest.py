"""Hypothesis profiles: `ci` by default, `thorough` by HYPOTHESIS_PROFILE=thorough."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

SLOW_DRAWS = [HealthCheck.too_slow, HealthCheck.data_too_large]  # a drawn case runs several transforms

settings.register_profile(
    "ci", max_examples=150, deadline=None, print_blob=True, derandomize=True, suppress_health_check=SLOW_DRAWS
)
settings.register_profile(
    "thorough", max_examples=2000, deadline=None, print_blob=True, suppress_health_check=SLOW_DRAWS
)
torch.set_num_threads(1)  # the tensors are tiny, and two workers share two cores
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(autouse=True)
def _same_world():
    """Every test starts from one seed, and none may leave a global setting changed."""
    torch.manual_seed(0)
    yield
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()
    assert torch.get_num_threads() == 1
