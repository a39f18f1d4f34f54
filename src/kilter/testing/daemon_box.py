"""A machine in a directory with `kilter daemon` on it, and jobs of several users.

As `kilter.testing.box`, but only root may set the cards; the jobs go through the daemon. Jobs of
other users than the present one need root, and a directory that they can reach.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kilter.core.daemon_protocol import SOCKET_VARIABLE
from kilter.lease.daemon.peers import owner_of
from kilter.testing.box import TIMEOUT_S, Box, BoxJob, until

POLICY = """
[limits]
messages-per-s = 1000

[[allow]]
users = [{users}]
gpus = ["*"]
sm-clock-mhz = [600, 1980]
power-limit-w = [300, 700]
gpus-at-once = 2
"""


class DaemonBox(Box):
    """Starts with the daemon running, and everything allowed to the present user and to `uids`."""

    def __init__(
        self,
        root: Path,
        *,
        cards: int = 1,
        uids: tuple[int, ...] = (),
        policy: str | None = None,
        options: tuple[str, ...] = (),
    ) -> None:
        super().__init__(root, cards=cards)
        root.chmod(0o1777)
        for name in ("cards.json.lock", "cards.json.calls"):
            (root / name).touch()
            (root / name).chmod(0o666)
        with self.fake.edit() as state:
            state.permitted_uid = os.geteuid()
        (root / "cards.json").chmod(0o644)
        users = ", ".join(map(str, (os.geteuid(), *uids)))
        self.config = root / "daemon.toml"
        self.config.write_text(POLICY.format(users=users) if policy is None else policy)
        self.config.chmod(0o644)
        self.audit = root / "audit.jsonl"
        self.socket = root / "kilter.sock"
        self.options = options
        self.daemon = self.start_daemon()

    def environ(self, **more: str) -> dict[str, str]:
        return super().environ(**{SOCKET_VARIABLE: str(self.socket)} | more)

    def start_daemon(self) -> subprocess.Popen[bytes]:
        """Returns when it answers."""
        paths = ("--socket", self.socket, "--config", self.config, "--audit", self.audit)
        with open(self.root / "daemon.log", "ab") as log:
            self.daemon = subprocess.Popen(
                [sys.executable, "-m", "kilter", "daemon", *map(str, paths), *self.options],
                env=super().environ(KILTER_BASELINE=str(self.root / "baseline.toml")),
                stderr=log,
            )
        self.names[self.daemon.pid] = "daemon"
        give_up_s = time.monotonic() + TIMEOUT_S
        while not self.answers():
            if self.daemon.poll() is not None or time.monotonic() > give_up_s:
                log_text = (self.root / "daemon.log").read_text()
                raise RuntimeError(f"the daemon does not start: {log_text}")
            time.sleep(0.02)
        return self.daemon

    def answers(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(self.socket))
            except OSError:
                return False
            return True

    def kill_daemon(self) -> None:
        self.daemon.kill()
        self.daemon.wait(TIMEOUT_S)

    def end_daemon(self) -> int:
        """As `systemctl stop` does; its exit code."""
        self.daemon.send_signal(signal.SIGTERM)
        return self.daemon.wait(TIMEOUT_S)

    def job(
        self, name: str = "job", *, uid: int | None = None, card: int = 0, computes: bool = True
    ) -> BoxJob:
        """A job that computes on a card, and has set nothing. It is of the user `uid` already."""
        uuid = self.fake.state().cards[card].uuid
        job = BoxJob(self, {}, uuid=uuid, uid=uid)
        until(lambda: uid is None or owner_of(job.pid) == uid)
        self.jobs.append(job)
        self.names[job.pid] = name
        if computes:
            with self.fake.edit() as state:
                state.cards[card].pids += (job.pid,)
        (self.root / "cards.json").chmod(0o644)
        return job

    def start_contained(self) -> BoxJob:
        job = super().start_contained()
        if (pid := job.init_pid) is not None:
            with self.fake.edit() as state:
                state.cards[0].pids += (pid,)
        return job

    def low_job(self, name: str = "job", *, uid: int | None = None, card: int = 0) -> BoxJob:
        """A job that has lowered both knobs through the daemon."""
        return self.lowered_by(self.job(name, uid=uid, card=card))

    def audited(self, event: str) -> list[dict[str, Any]]:
        """The lines of the audit log of one kind."""
        lines = map(json.loads, self.audit.read_text().splitlines())
        return [line for line in lines if line["event"] == event]

    def until_free(self) -> None:
        """The daemon holds the lock while a job has a lease."""
        if self.daemon.poll() is None:
            give_up_s = time.monotonic() + TIMEOUT_S
            while any(self.state_directory.glob("GPU*.json")):
                if time.monotonic() > give_up_s:
                    raise TimeoutError("the daemon puts nothing back")
                time.sleep(0.01)

    def close(self) -> None:
        super().close()
        if self.daemon.poll() is None:
            self.kill_daemon()
