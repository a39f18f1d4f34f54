"""The fake has the names, codes, classes and signatures of the installed binding."""

from __future__ import annotations

import inspect

import pytest

from kilter.testing import fake_nvml
from kilter.testing.fake_nvml import FakeNvml

pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")

FUNCTIONS = sorted(name for name in vars(FakeNvml) if name.startswith("nvml") and name[4].isupper())
CALLS = [name for name in FUNCTIONS if callable(getattr(FakeNvml, name))]
CONSTANTS = [name for name in vars(FakeNvml) if name.startswith(("NVML_", "nvmlClocks"))]


@pytest.mark.parametrize("name", CALLS)
def test_call_has_the_parameters_of_the_binding(name: str) -> None:
    real = inspect.signature(getattr(pynvml, name)).parameters.values()
    fake = list(inspect.signature(getattr(FakeNvml, name)).parameters.values())[1:]
    assert [p.name for p in fake] == [p.name for p in real]
    assert [p.default is p.empty for p in fake] == [p.default is p.empty for p in real]


@pytest.mark.parametrize("name", CONSTANTS)
def test_constant_has_the_value_of_the_binding(name: str) -> None:
    assert getattr(FakeNvml, name) == getattr(pynvml, name)


@pytest.mark.parametrize("name", sorted(fake_nvml._ERRORS))
def test_error_has_the_code_of_the_binding(name: str) -> None:
    assert getattr(FakeNvml("unused"), f"NVML_ERROR_{name}") == getattr(
        pynvml, f"NVML_ERROR_{name}"
    )


@pytest.mark.parametrize("name", sorted(fake_nvml.ERROR_CLASSES))
def test_error_class_is_chosen_by_code_as_in_the_binding(name: str) -> None:
    code = getattr(pynvml, name)().value
    for module in (pynvml, FakeNvml("unused")):
        error = module.NVMLError(code)
        assert type(error).__name__ == name
        assert error.value == code


def test_a_request_for_metrics_has_the_fields_of_the_binding() -> None:
    """What `device/gpm` fills in and reads."""
    real, fake = pynvml.c_nvmlGpmMetricsGet_t(), FakeNvml("unused").c_nvmlGpmMetricsGet_t()
    for request in (real, fake):
        request.version, request.numMetrics = pynvml.NVML_GPM_METRICS_GET_VERSION, 3
        request.metrics[0].metricId = pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL
        assert [m.metricId for m in request.metrics[:3]] == [10, 0, 0]
        assert (request.metrics[0].nvmlReturn, request.metrics[0].value) == (0, 0.0)
    real.sample1 = pynvml.c_nvmlGpmSample_t()
