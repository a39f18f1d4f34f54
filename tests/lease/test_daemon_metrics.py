"""What Prometheus sees of a daemon that really runs, and the dashboard that asks for it."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from kilter.testing.box import LOW
from kilter.testing.daemon_box import DaemonBox

pytest.importorskip("prometheus_client")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs SO_PEERCRED and pidfd")
DASHBOARD = Path(__file__).parents[2] / "examples" / "operators" / "grafana-dashboard.json"


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def box(port: int) -> Iterator[DaemonBox]:
    with tempfile.TemporaryDirectory(prefix="kilter-metrics-") as root:
        box = DaemonBox(Path(root), options=("--metrics", f"127.0.0.1:{port}"))
        yield box
        box.close()
        box.end_daemon()


def scrape(port: int) -> dict[str, list[tuple[dict[str, str], float]]]:
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        found.setdefault(family.name, [])
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_leases_settings_energy_and_refusals_are_there(box: DaemonBox, port: int) -> None:
    assert scrape(port)["kilter_leases"] == []
    job = box.low_job()
    [(labels, value)] = scrape(port)["kilter_leases"]
    assert (labels["gpu"], labels["pid"], value) == (box.uuid, str(job.pid), 1.0)
    assert scrape(port)["kilter_setting_sm_clock_hertz"] == [(labels, 1.2e9)]
    assert scrape(port)["kilter_setting_power_limit_watts"] == [(labels, 400.0)]
    with box.fake.edit() as state:
        state.cards[0].energy_mj += 7_000
    job.ask("renew")
    [(_, energy_j)] = scrape(port)["kilter_lease_energy_joules"]
    assert energy_j == pytest.approx(7.0)
    [(user, billed_j)] = scrape(port)["kilter_energy_joules_total"]
    assert user == {"user": labels["user"]}
    assert billed_j == pytest.approx(energy_j)
    with box.fake.edit() as state:
        state.cards[0].energy_mj += 2_000
    job.end()
    idle = box.job(computes=False)
    idle.ask("enter")
    assert idle.ask("set", **LOW)["error"] == "NotPermitted"
    after = scrape(port)
    assert after["kilter_leases"] == []
    assert after["kilter_restores_total"] == [(user, 1.0)]
    [(refused, count)] = after["kilter_refusals_total"]
    assert refused == {**user, "error": "NotPermitted"}
    assert count >= 1.0
    [(_, total_j)] = after["kilter_energy_joules_total"]
    assert total_j == pytest.approx(9.0)


def test_somebody_who_scrapes_and_says_nothing_delays_no_lease(box: DaemonBox, port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)):
        job = box.low_job()
        assert job.end()["state"] == "restored"
    assert "kilter_leases" in scrape(port)


def test_the_dashboard_asks_for_what_there_is(box: DaemonBox, port: int) -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    named = {name for text in asked for name in re.findall(r"kilter_\w+", text)}
    there = scrape(port)
    assert named <= there.keys() | {f"{name}_total" for name in there}
    assert len(named) == len(asked)


@pytest.mark.parametrize("address", ["0.0.0.0:9465", "127.0.0.1", "localhost:9465", "127.0.0.1:x"])
def test_only_a_loopback_address(tmp_path: Path, address: str) -> None:
    with tempfile.TemporaryDirectory(prefix="kilter-metrics-") as root:
        box = DaemonBox(Path(root))
        box.end_daemon()
        words = ["--socket", root + "/s", "--config", str(box.config), "--audit", str(box.audit)]
        done = subprocess.run(
            [sys.executable, "-m", "kilter", "daemon", "--metrics", address, *words],
            env=box.environ(),
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 2
    assert "127.0.0.1:9465" in done.stderr
