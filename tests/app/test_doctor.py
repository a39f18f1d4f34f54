"""`kilter doctor`: exit codes, keys, and one line of advice for each thing that is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kilter.app.cli import doctor
from kilter.app.cli.main import main
from kilter.core.setting import Setting
from kilter.device import nvidia
from kilter.lease.journal import Journal, JournalPlace, boot_id
from kilter.testing.fake_card import Card, Rule
from kilter.testing.fake_nvml import FakeNvml

Machine = Callable[..., FakeNvml]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine with fake cards, a CUDA build of torch, and nothing else that could be noticed."""
    monkeypatch.setattr(doctor, "WATCH_S", 0.2)
    monkeypatch.setattr(doctor, "torch_version", lambda: "2.13.0")
    monkeypatch.setattr(doctor, "_controllers", lambda: iter(()))
    monkeypatch.setattr(doctor, "_internals", lambda _: iter(()))
    monkeypatch.setenv("KILTER_STATE_DIR", str(tmp_path / "state"))
    for variable in ("KILTER_READ_ONLY", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(variable, raising=False)

    def make(*cards: Card, **options: Any) -> FakeNvml:
        fake = FakeNvml.create(tmp_path / "cards.json", *cards, virtual_time=False, **options)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        monkeypatch.setattr(nvidia, "missing_privilege", fake.missing_privilege)
        return fake

    return make


def examined(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", "--json", *options])
    return code, json.loads(capsys.readouterr().out)


def troubles(found: dict[str, Any]) -> list[str]:
    return [f"{c['found']} -> {c['advice']}" for c in found["checks"] if c["status"] != "fine"]


def test_a_good_machine_is_fine(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    fake = machine(Card(load=1.0))
    code, found = examined(capsys)
    assert (code, found["status"], troubles(found)) == (0, "fine", [])
    assert found["gpus"][0]["can_set"] is True
    assert found["gpus"][0]["energy_method"] == "counter"
    assert fake.setters() == []


def test_keys_are_a_contract(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine()
    _, found = examined(capsys)
    assert found["schema"] == "kilter.doctor/1"
    assert found["label"] == "measured"
    assert {"status", "kilter", "python", "torch", "driver", "gpus", "checks"} <= set(found)
    assert set(found["checks"][0]) == {"name", "status", "found", "advice"}
    assert set(found["gpus"][0]) >= {
        "index", "uuid", "name", "visible", "can_set", "refusal", "sm_clocks_hz",
        "memory_clocks_hz", "power_limits_w", "power_limit_w", "power_w", "sm_clock_hz",
        "energy_method", "sensor_period_s", "memory_bytes", "persistence",
    }  # fmt: skip


def test_text_gives_advice_below_each_trouble(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine(permitted=False)
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    trouble = next(i for i, line in enumerate(lines) if line.startswith("  warning"))
    assert "may not be set" in lines[trouble]
    assert lines[trouble + 1].strip().startswith("->")


@pytest.mark.parametrize(
    ("card", "said"),
    [
        (Card(mig=True), "MIG is on"),
        (Card(virtualization=2), "vGPU"),
        (Card(load=1.0, counter_stuck=True), "trust the integral of power"),
        (Card(load=1.0, module_w=400.0), "trust the integral of power"),
        (Card(load=1.0, sm_lock_mhz=(345, 900)), "nvidia-smi -rgc"),
        (Card(persistence=False), "nvidia-smi -pm 1"),
    ],
)
def test_what_limits_kilter_is_a_warning(
    machine: Machine, capsys: pytest.CaptureFixture[str], card: Card, said: str
) -> None:
    machine(card)
    code, found = examined(capsys)
    assert code == 1
    assert said in " ".join(troubles(found))


def test_read_only_is_a_warning(
    machine: Machine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine()
    monkeypatch.setenv("KILTER_READ_ONLY", "1")
    code, found = examined(capsys)
    assert code == 1
    assert found["gpus"][0]["can_set"] is False
    assert "KILTER_READ_ONLY" in " ".join(troubles(found))


def test_a_limit_set_by_the_site_and_a_capped_clock_are_no_trouble(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine(Card(load=1.0, limit_mw=500_000))
    code, found = examined(capsys)
    assert (code, troubles(found)) == (0, [])
    assert found["gpus"][0]["power_limit_w"] == 500.0


def test_no_driver_is_a_warning_with_two_ways_on(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = machine()
    with fake.edit() as state:
        state.init_error = fake.NVML_ERROR_LIBRARY_NOT_FOUND
    code, found = examined(capsys)
    assert (code, found["driver"], found["gpus"]) == (1, None, [])
    assert "install the NVIDIA driver" in troubles(found)[0]
    assert "sim:" in troubles(found)[0]


def test_a_mismatched_driver_is_critical(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = machine()
    with fake.edit() as state:
        state.init_error = fake.NVML_ERROR_LIB_RM_VERSION_MISMATCH
    code, found = examined(capsys)
    assert (code, found["status"]) == (2, "critical")
    assert "reboot" in troubles(found)[0]


def test_a_lost_gpu_is_critical_and_the_other_is_still_examined(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = machine(Card(), Card())
    with fake.edit() as state:
        state.rules.append(
            Rule(call="nvmlDeviceGetUUID", card=0, error=fake.NVML_ERROR_GPU_IS_LOST)
        )
    code, found = examined(capsys)
    assert code == 2
    assert found["gpus"][0]["can_set"] is None
    assert found["gpus"][1]["can_set"] is True


def test_an_error_that_nobody_knows_is_unknown(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = machine()
    with fake.edit() as state:
        state.rules.append(Rule(call="nvmlDeviceGetMemoryInfo", error=fake.NVML_ERROR_UNKNOWN))
    code, found = examined(capsys)
    assert (code, found["status"]) == (3, "unknown")


def test_only_visible_gpus_are_opened(
    machine: Machine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = machine(Card(), Card(), Card())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    _, found = examined(capsys)
    assert [gpu["visible"] for gpu in found["gpus"]] == [False, False, True]
    assert {call.card for call in fake.calls("nvmlDeviceGetPower*")} == {2}


def test_what_a_dead_run_left_is_critical_and_what_a_live_one_has_set_is_not(
    machine: Machine, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    machine()
    (tmp_path / "state").mkdir()
    place = JournalPlace(tmp_path / "state", "GPU-7")
    journal = Journal(
        uuid="GPU-7",
        backend="nvml",
        boot_id=boot_id(),
        pid=4711,
        start_ticks=0,
        nonce="0",
        found=Setting(power_limit_w=600.0),
        before=Setting(power_limit_w=600.0),
        last=Setting(sm_clock_hz=1200e6, power_limit_w=600.0),
        written="2026-11-20T12:00:00+00:00",
    )
    place.write(journal)
    code, found = examined(capsys)
    assert code == 2
    assert "4711" in troubles(found)[0]
    assert "kilter restore" in troubles(found)[0]
    lock = place.lock()
    code, found = examined(capsys)
    assert (code, troubles(found)) == (0, [])
    place.unlock(lock)


def test_a_damaged_journal_is_critical(
    machine: Machine, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    machine()
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "GPU-1.json").write_text("{")
    code, found = examined(capsys)
    assert code == 2
    assert "GPU-1.json" in troubles(found)[0]


def test_without_torch_it_says_so(
    machine: Machine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine()
    monkeypatch.setattr(doctor, "torch_version", lambda: None)
    code, found = examined(capsys)
    assert (code, found["torch"]) == (1, None)
    assert "pip install torch" in troubles(found)[0]


def test_null_looks_at_no_gpu_and_an_unknown_device_is_wrong_usage(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = machine()
    code, found = examined(capsys, "--device", "null")
    assert (code, found["gpus"], fake.calls()) == (0, [], [])
    assert main(["doctor", "--device", "sim:v100"]) == 2


def test_runs_as_a_command_and_imports_no_torch(tmp_path: Path) -> None:
    """Also shows how another process sees fake cards."""
    fake = FakeNvml.create(tmp_path / "cards.json", Card(), virtual_time=False)
    (tmp_path / "torch.py").write_text("raise SystemExit('this torch is broken')\n")
    environ = fake.environ()
    environ["KILTER_STATE_DIR"] = str(tmp_path / "state")
    environ["PYTHONPATH"] = f"{tmp_path}:{environ['PYTHONPATH']}"
    done = subprocess.run(
        [sys.executable, "-m", "kilter.app.cli.main", "doctor", "--json"],
        env=environ,
        capture_output=True,
        text=True,
    )
    found = json.loads(done.stdout)
    assert found["gpus"][0]["name"] == "NVIDIA Fake H200", done.stderr
    assert any("cannot be imported: this torch is broken" in text for text in troubles(found))
    assert fake.setters() == []
