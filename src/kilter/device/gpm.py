"""How busy the units of an NVIDIA GPU are, by NVML's GPU performance monitoring (GPM): Hopper and
newer. Reads only.

A metric is a mean over the time between two samples of the GPU's counters. The counters are apart
from those of the profilers, so that neither disturbs the other (a maintainer in NVIDIA/DCGM#62).
"""

from __future__ import annotations

import math
from typing import Any

from kilter.core.errors import DeviceError, DeviceHung, DeviceLost
from kilter.core.setting import Activity
from kilter.device.vendor import VendorLibrary

EVERY_S = 1.0
"""Two samples are this far apart."""
SM_UTIL, ANY_TENSOR_UTIL, DRAM_BW_UTIL = 2, 5, 10
"""These are NVML_GPM_METRIC_*: shares of the SMs that are busy, of the tensor pipes' cycles, and of
the memory's bandwidth, in percent."""
METRICS_VERSION = 1
"""NVML_GPM_METRICS_GET_VERSION."""


class UnitMonitor:
    """The units of one GPU. Where the binding, the driver or the GPU has no such metrics, or does
    not permit them, `read` is None for ever. All calls are made in one thread."""

    def __init__(self, library: VendorLibrary, handle: Any) -> None:
        self._library = library
        self.handle = handle
        self._absent = False
        self._samples: list[Any] = []
        """The last one comes first; there are two of them once there is something to compare."""
        self._sampled_s = -math.inf
        self._last: Activity | None = None

    def read(self, now_s: float) -> Activity | None:
        """Means over the last interval. Raises only what ends all reading: `DeviceLost` and
        `DeviceHung`."""
        if self._absent or now_s < self._sampled_s + EVERY_S:
            return self._last
        try:
            self._last = self._next()
        except (DeviceLost, DeviceHung):
            raise
        except DeviceError:
            self._absent, self._last = True, None
        self._sampled_s = now_s
        return self._last

    def close(self) -> None:
        """Give the samples' memory back to the driver's library."""
        samples, self._samples, self._absent = self._samples, [], True
        for sample in samples:
            self._library.call("nvmlGpmSampleFree", sample)

    def _next(self) -> Activity | None:
        if len(self._samples) < 2:
            if not self._samples and not self._supported():
                self._absent = True
                return None
            self._samples.insert(0, self._library.call("nvmlGpmSampleAlloc"))
        else:
            self._samples.reverse()
        self._library.call("nvmlGpmSampleGet", self.handle, self._samples[0])
        return self._compared() if len(self._samples) == 2 else None

    def _supported(self) -> bool:
        answer = self._library.call("nvmlGpmQueryDeviceSupport", self.handle)
        return bool(answer.isSupportedDevice)

    def _compared(self) -> Activity:
        request = self._library.call("c_nvmlGpmMetricsGet_t")
        ids = (SM_UTIL, DRAM_BW_UTIL, ANY_TENSOR_UTIL)
        request.version, request.numMetrics = METRICS_VERSION, len(ids)
        request.sample2, request.sample1 = self._samples
        for metric, number in zip(request.metrics, ids, strict=False):
            metric.metricId = number
        self._library.call("nvmlGpmMetricsGet", request)
        sm, dram, tensor = map(_share, request.metrics[: len(ids)])
        return Activity(sm=sm, dram=dram, tensor=tensor)


def _share(metric: Any) -> float | None:
    if metric.nvmlReturn != 0 or not math.isfinite(metric.value):
        return None
    return float(min(1.0, max(0.0, metric.value / 100)))
