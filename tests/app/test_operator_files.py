"""What an operator installs: shell syntax, a fake Slurm, the units, and what doctor says."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kilter.core.setting import Setting
from kilter.testing.box import FOUND, Box, kill_watcher
from kilter.testing.daemon_box import DaemonBox

SCRIPTS = Path(__file__).parents[2] / "examples" / "operators"


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.sh")), ids=lambda path: path.name)
def test_shell_syntax(script: Path) -> None:
    for shell in filter(shutil.which, ("sh", "bash", "dash")):
        subprocess.run([shell, "-n", str(script)], check=True, timeout=900)
    assert os.access(script, os.X_OK)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Box]:
    """A node with two cards, a `kilter` and a `logger` on its path, and a saved baseline."""
    box = Box(tmp_path, cards=2)
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "kilter").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m kilter "$@"\n')
    (tools / "logger").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/log\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    assert slurm(box, "kilter", "baseline", "save") == 0
    yield box
    box.close()
    kill_watcher(box.state_directory)


def slurm(box: Box, *command: str, **environ: str) -> int:
    """Run as slurmd does, with nothing but its own variables."""
    more = {"PATH": f"{box.root}/bin:{os.environ['PATH']}"}
    more["KILTER_BASELINE"] = str(box.root / "baseline.toml")
    return subprocess.run(
        command, env=box.environ(**more, **environ), timeout=900, stdout=subprocess.DEVNULL
    ).returncode


def test_an_epilog_leaves_nothing_of_a_job(node: Box) -> None:
    job = node.low()
    kill_watcher(node.state_directory)
    job.kill()
    with node.fake.edit() as state:  # and somebody's lock on another GPU that the job had
        state.cards[1].sm_lock_mhz = (345, 900)
    assert node.setting() != FOUND
    script = str(SCRIPTS / "slurm-epilog.sh")
    assert slurm(node, script, SLURM_JOB_GPUS="0,1", SLURM_JOB_ID="7") == 0
    assert (node.setting(0), node.setting(1)) == (FOUND, FOUND)
    assert not (node.root / "log").exists()


def test_a_prolog_puts_only_the_jobs_gpus_to_their_baseline(node: Box) -> None:
    with node.fake.edit() as state:
        state.cards[0].limit_mw = state.cards[1].limit_mw = 300_000
    script = str(SCRIPTS / "slurm-prolog.sh")
    assert slurm(node, script, SLURM_JOB_GPUS="1", SLURM_JOB_ID="7") == 0
    assert node.setting(0) == Setting(power_limit_w=300.0)
    assert node.setting(1) == FOUND


def test_a_script_that_fails_says_so_and_does_not_drain_the_node(node: Box) -> None:
    node.refuse("nvmlDeviceSet*")
    with node.fake.edit() as state:
        state.cards[0].limit_mw = 300_000
    script = str(SCRIPTS / "slurm-prolog.sh")
    assert slurm(node, script, SLURM_JOB_GPUS="0", SLURM_JOB_ID="7") == 0
    assert "prolog of job 7" in (node.root / "log").read_text()
    assert slurm(node, script, SLURM_JOB_ID="8") == 0


def test_units_start_this_python(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kilter", "daemon", "units", str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=900,
    )
    assert [Path(line).name for line in done.stdout.splitlines()] == [
        "kilter.service",
        "kilter.socket",
    ]
    service = (tmp_path / "kilter.service").read_text()
    assert f'ExecStart="{sys.executable}" -P -m kilter daemon\n' in service
    assert f'ExecStopPost="{sys.executable}" -P -m kilter restore --all\n' in service
    assert "@" not in service
    verify = shutil.which("systemd-analyze")
    if verify:
        subprocess.run(
            [verify, "verify", str(tmp_path / "kilter.service")], check=True, timeout=900
        )


def test_a_socket_of_systemd_is_used(tmp_path: Path) -> None:
    box = DaemonBox(tmp_path)
    try:
        box.end_daemon()
        path = tmp_path / "passed.sock"
        with socket.socket(socket.AF_UNIX) as passed:
            passed.bind(str(path))
            passed.listen()
            number = passed.fileno()
            start = (
                f"import os, sys; os.dup2({number}, 3); os.environ['LISTEN_PID']=str(os.getpid());"
                "os.environ['LISTEN_FDS']='1'; from kilter.app.cli.main import main;"
                f"sys.exit(main(['daemon', '--config', {str(box.config)!r},"
                f"'--audit', {str(box.audit)!r}, '--socket', '/nowhere/at/all']))"
            )
            box.daemon = subprocess.Popen(
                [sys.executable, "-c", start], env=box.environ(), pass_fds=[number]
            )
        box.socket = path
        job = box.low_job()
        assert box.last_setter() != "job"
        job.end()
        assert box.setting() == FOUND
        assert box.end_daemon() == 0
    finally:
        box.close()


def doctor(box: Box, *options: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "kilter", "doctor", *options],
        env=box.environ(),
        capture_output=True,
        text=True,
        timeout=900,
    ).stdout


def test_doctor_says_which_way_is_in_force(tmp_path: Path) -> None:
    box = DaemonBox(tmp_path)
    try:
        checks = json.loads(doctor(box, "--json"))["checks"]
        [way] = [check for check in checks if check["name"] == "way to gpu 0"]
        assert way["status"] == "fine"
        assert "kilter daemon sets it for you" in way["found"]
        box.end_daemon()
        assert "this process sets it" in doctor(box)
        with box.fake.edit() as state:
            state.permitted = False
        text = doctor(box)
        assert "none: " in text
    finally:
        box.close()


def test_the_operators_three_lines_are_true(tmp_path: Path) -> None:
    """Each command of the advice is one that this kilter has."""
    from kilter.app.cli.doctor import OPERATOR

    lines = [line.split() for line in OPERATOR.splitlines()[1:]]
    assert len(lines) == 3
    assert lines[0][:3] == ["kilter", "daemon", "--help"]
    told = subprocess.run(
        [sys.executable, "-m", *lines[0][:3]], capture_output=True, text=True, timeout=900
    ).stdout
    assert "[[allow]]" in told
    command = [sys.executable, "-m", *lines[1][:3], str(tmp_path)]
    assert subprocess.run(command, timeout=900, stdout=subprocess.DEVNULL).returncode == 0
    assert (tmp_path / lines[2][-1]).exists()
