"""`kilter daemon`: sets clocks for users who are not root; `kilter daemon check` explains why."""

from __future__ import annotations

import argparse
import importlib.resources
import os
import pwd
import sys
from contextlib import closing
from pathlib import Path

import msgspec

from kilter.core.codec import write_atomically
from kilter.core.daemon_protocol import KNOB_NAMES, SOCKET, Grant
from kilter.core.errors import DeviceError, UsageError
from kilter.core.label import Label
from kilter.core.reasons import Reason
from kilter.device.nvidia import Gpu, NvidiaDevice, survey
from kilter.lease.daemon import main as daemon
from kilter.lease.daemon.peers import occupancy_refusal, user_of
from kilter.lease.daemon.policy import User, decide
from kilter.lease.journal import state_directory

HELP = """\
Set the clocks and power limits of GPUs for users who are not root, by the operator's policy.

`kilter run` finds the daemon's socket by itself. Who asks, the kernel says. A user may set only
what the policy allows, on a GPU on which a process of that user computes and nobody else's does.
What was found is put back when the user's job ends, dies, hangs past its deadline, or loses its
container, and when the daemon ends. MIG and vGPU are refused. Every set is in the audit log.
"""
EPILOG = f"""\
The policy (TOML, owned by root, writable by root alone; read again on SIGHUP):

  [[allow]]
  users = ["alice", 1007]        # names or numbers; "*" is every user but root
  groups = ["ml"]
  gpus = ["*"]                   # UUIDs or their beginnings
  sm-clock-mhz = [600, 1980]     # a knob that is not named may not be set
  power-limit-w = [300, 700]
  gpus-at-once = 2

The first [[allow]] that names the user and the GPU decides.

examples:
  kilter daemon                              as root; normally by its systemd unit
  kilter daemon units /etc/systemd/system    write its systemd units; then: systemctl enable --now
                                             kilter.service (and kilter.socket, if you like)
  kilter daemon check alice 0                may alice set GPU 0 now, and what?
  kilter daemon --socket /tmp/k.sock --config my.toml --audit /tmp/audit.jsonl

For metrics, the unit needs `PrivateNetwork=no`, `RestrictAddressFamilies=AF_UNIX AF_INET` and the
option --metrics 127.0.0.1:9465 in a drop-in (systemctl edit kilter.service).

The socket is {SOCKET}; a container needs it mounted. KILTER_SOCKET names another one.
"""

UNITS = importlib.resources.files("kilter.app") / "operator"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "kilter daemon [options] [check USER GPU | units DIR]"
    for name, default, metavar, what in (
        ("socket", Path(SOCKET), "PATH", ""),
        ("config", daemon.CONFIG, "FILE", "the policy "),
        ("audit", daemon.AUDIT, "FILE", "the audit log "),
    ):
        text = f"{what}(default: {default})"
        parser.add_argument(f"--{name}", type=Path, default=default, metavar=metavar, help=text)
    parser.add_argument(
        "--metrics",
        metavar="HOST:PORT",
        help="serve Prometheus metrics there, on a loopback address: leases, settings, energy by "
        "user and job, refusals; every local user can read them (pip install 'kilter[metrics]')",
    )
    parser.add_argument("--json", action="store_true", help="of check: one JSON object on stdout")
    parser.add_argument(
        "words",
        nargs="*",
        metavar="WORD",
        help="check USER GPU: explain what the policy decides for a user and a GPU (index or UUID);"
        " units DIR: write the systemd units there",
    )


def run(arguments: argparse.Namespace) -> int:
    words = arguments.words
    if words and words[0] == "units":
        return units(words[1:])
    if words:
        if words[0] != "check" or len(words) != 3:
            raise UsageError("expected nothing, or: check USER GPU, or: units DIR")
        return check(arguments.config, words[1], words[2], as_json=arguments.json)
    directory = state_directory(os.environ)
    daemon.run(
        arguments.socket,
        arguments.config,
        arguments.audit,
        directory,
        os.environ,
        metrics=arguments.metrics,
    )
    return 0


def units(words: list[str]) -> int:
    """Write the systemd units, which start the daemon with this Python."""
    if len(words) != 1 or not Path(words[0]).is_dir():
        raise UsageError("expected: units DIR, an existing directory such as /etc/systemd/system")
    for source in sorted(UNITS.iterdir(), key=lambda one: one.name):
        if source.name.startswith("kilter."):
            path = Path(words[0], source.name)
            python = f'"{sys.executable}"'.replace("%", "%%")  # as systemd reads it
            text = source.read_text().replace("@PYTHON@", python)
            write_atomically(path, text.encode())
            path.chmod(0o644)
            print(path)
    return 0


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """What `check --json` prints."""

    schema: str = "kilter.daemon.check/1"
    label: str = Label.MEASURED.value
    user: str
    uid: int
    gpu: str
    may: bool
    """It goes by the policy and by what the GPU is."""
    now: bool
    """The GPU may be set at this moment, also by whose processes compute on it."""
    reason: Reason | None = None
    grant: Grant | None = None


def check(config: Path, user_word: str, gpu_word: str, *, as_json: bool) -> int:
    """Explain a decision. The exit code is 0 if the user may set the GPU now."""
    policy = daemon.load_policy(config)
    user, gpu = _user(user_word), _gpu(gpu_word)
    grant = decide(policy, user, gpu.uuid)
    reason: Reason | None = grant if isinstance(grant, Reason) else None
    may = reason is None
    if reason is None:
        reason = _device_refusal(gpu.uuid)
        may = reason is None
    if reason is None:
        reason = _occupancy(gpu.uuid, user)
    checked = Checked(
        user=user.name,
        uid=user.uid,
        gpu=gpu.uuid,
        may=may,
        now=reason is None,
        reason=reason,
        grant=grant if isinstance(grant, Grant) else None,
    )
    print(msgspec.json.encode(checked).decode() if as_json else _as_text(checked, gpu))
    return 0 if checked.now else 1


def _user(word: str) -> User:
    if word.isdecimal():
        return user_of(int(word))
    try:
        return user_of(pwd.getpwnam(word).pw_uid)
    except KeyError:
        raise UsageError(f"there is no user {word!r} on this machine") from None


def _gpu(word: str) -> Gpu:
    gpus = survey().gpus
    for gpu in gpus:
        if word in (str(gpu.index), gpu.uuid):
            return gpu
    raise UsageError(f"there is no GPU {word!r}: this machine has {len(gpus)}, by index or UUID")


def _device_refusal(uuid: str) -> Reason | None:
    with closing(NvidiaDevice(uuid)) as device:
        refusal = device.info().refusal
    return None if refusal is None else Reason("gpu_cannot_be_set", uuid, refusal)


def _occupancy(uuid: str, user: User) -> Reason | None:
    with closing(NvidiaDevice(uuid)) as device:
        try:
            return occupancy_refusal(device.compute_pids(), user.uid)
        except DeviceError as error:
            return Reason("processes_unknown", uuid, str(error))


def _as_text(checked: Checked, gpu: Gpu) -> str:
    verdict = "may set" if checked.now else ("may set later" if checked.may else "may not set")
    lines = [f"user {checked.user} ({checked.uid}) {verdict} GPU {gpu.index} ({checked.gpu})"]
    if checked.reason is not None:
        lines.append(f"  because {checked.reason}")
    if checked.grant is not None:
        for knob, name, unit, scale in KNOB_NAMES:
            allowed = getattr(checked.grant, knob)
            text = "no"
            if allowed is not None:
                text = f"{allowed[0] / scale:g} to {allowed[1] / scale:g} {unit}"
            lines.append(f"  {name}: {text}")
        lines.append(f"  GPUs at once: {checked.grant.gpus_at_once}")
    return "\n".join(lines)
