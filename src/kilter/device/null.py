"""No device: nothing to sample, nothing to set. The loop above runs as it would, and says why not.

Also the shortest complete back end, for whoever writes the next one.
"""

from __future__ import annotations

import time

from kilter.core.errors import NotSupported
from kilter.core.label import Label
from kilter.core.setting import DeviceInfo, Sample, Setting, Supported


class NullDevice:
    """A device with a clock, and without sensors and knobs."""

    def __init__(self, reason: str = "there is no device to set") -> None:
        """`reason` says why there is none; users read it."""
        self._reason = reason

    def info(self) -> DeviceInfo:
        return DeviceInfo(
            name="no GPU",
            uuid="null",
            backend="null",
            label=Label.MEASURED,
            can_set=False,
            refusal=self._reason,
            persistent=False,
        )

    def sample(self, *, energy: bool = False) -> Sample:
        return Sample(t_s=time.monotonic())

    def supported(self) -> Supported:
        return Supported()

    def settings(self) -> Setting:
        return Setting()

    def set(self, setting: Setting) -> None:
        if setting != Setting():
            raise NotSupported(f"cannot set {setting}: {self._reason}")

    def reset(self) -> None:
        pass

    def close(self) -> None:
        pass
