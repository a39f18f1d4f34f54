"""A GPU behind `kilter daemon`: the conformance suite, with a daemon that really runs."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kilter.core.setting import Setting
from kilter.device.daemon import DaemonDevice
from kilter.device.find import find
from kilter.device.nvidia import NvidiaDevice
from kilter.device.protocol import Device, KeptElsewhere
from kilter.testing.daemon_box import DaemonBox
from kilter.testing.device import DeviceConformance
from kilter.testing.fake_nvml import FakeNvml

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs SO_PEERCRED and pidfd")

EVERYTHING = f"""
[limits]
messages-per-s = 10000

[[allow]]
users = [{os.geteuid()}]
sm-clock-mhz = [1, 10000]
memory-clock-mhz = [1, 10000]
power-limit-w = [1, 10000]
"""


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonBox]:
    with tempfile.TemporaryDirectory(prefix="kilter-daemon-") as root:
        box = DaemonBox(Path(root), policy=EVERYTHING)
        with box.fake.edit() as state:
            state.cards[0].pids = (os.getpid(),)
            state.cards[0].limit_mw = None
        yield box
        box.close()


def open_device(box: DaemonBox, socket: Path | None = None) -> DaemonDevice:
    fake = FakeNvml(box.fake.path)
    reader = NvidiaDevice(box.uuid, nvml=fake, privilege=fake.missing_privilege)
    return DaemonDevice(box.uuid, reader=reader, socket_path=socket or box.socket)


@pytest.fixture(autouse=True)
def _writable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KILTER_READ_ONLY", raising=False)


class TestGpuBehindTheDaemon(DeviceConformance):
    @pytest.fixture(autouse=True)
    def _daemon(self, daemon: DaemonBox) -> None:
        self.box = daemon

    def make_device(self) -> Device:
        return open_device(self.box)


def test_nothing_is_set_when_the_environment_forbids_it(
    daemon: DaemonBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = open_device(daemon)
    before = len(daemon.fake.setters())
    monkeypatch.setenv("KILTER_READ_ONLY", "1")
    assert not device.info().can_set
    with pytest.raises(Exception, match="KILTER_READ_ONLY"):
        device.set(Setting(sm_clock_hz=1.2e9))
    assert len(daemon.fake.setters()) == before


def test_closing_puts_back(daemon: DaemonBox) -> None:
    found = daemon.setting()
    device = open_device(daemon)
    device.set(Setting(sm_clock_hz=1.2e9))
    assert daemon.setting() != found
    device.close()
    assert daemon.setting() == found


def test_without_a_daemon_the_refusal_names_the_socket(daemon: DaemonBox) -> None:
    device = open_device(daemon, daemon.root / "nothing-here")
    info = device.info()
    assert not info.can_set
    assert "nothing-here" in (info.refusal or "")


def test_a_socket_that_says_nothing_sensible_is_a_refusal(
    daemon: DaemonBox, tmp_path: Path
) -> None:
    import socket
    import threading

    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def babble() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"\xff\x00 not json\n")

        thread = threading.Thread(target=babble)
        thread.start()
        info = open_device(daemon, path).info()
        thread.join()
    assert not info.can_set
    assert "cannot be understood" in (info.refusal or "")


def test_find_takes_the_daemon_where_its_socket_is(daemon: DaemonBox) -> None:
    environ = {"KILTER_SOCKET": str(daemon.socket)}
    found = find("nvml", uuid=daemon.uuid, environ=environ, nvml=FakeNvml(daemon.fake.path))
    assert isinstance(found, KeptElsewhere)
    assert found.info().can_set
    found.close()
    without = find(
        "nvml", uuid=daemon.uuid, environ={"KILTER_SOCKET": ""}, nvml=FakeNvml(daemon.fake.path)
    )
    assert isinstance(without, NvidiaDevice)
