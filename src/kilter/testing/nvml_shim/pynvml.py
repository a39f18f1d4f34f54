"""Stands in for `nvidia-ml-py` in a test's subprocess: see `kilter.testing.fake_nvml`."""

from __future__ import annotations

import os
from typing import Any

import kilter.device.nvidia
from kilter.testing.fake_nvml import FAKE_STATE_VARIABLE, FakeNvml

_fake = FakeNvml(os.environ[FAKE_STATE_VARIABLE])
kilter.device.nvidia.missing_privilege = _fake.missing_privilege


def __getattr__(name: str) -> Any:
    return getattr(_fake, name)
