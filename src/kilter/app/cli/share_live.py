"""`kilter share serve`, `run` and `top`: fair sharing of a real machine."""

from __future__ import annotations

import argparse
import functools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kilter.app.cli.options import argument, fraction, positive, seconds, size
from kilter.app.cli.output import print_json, show_live
from kilter.app.fields import taken
from kilter.app.share_page import page
from kilter.app.share_worker import ShareOptions, worker_command, worker_environment
from kilter.connect.launch import add_torchrun_options, run_shared, run_without_kilter
from kilter.connect.ray_launch import RayJob, connect, named_variables
from kilter.connect.ray_rank import RankSite
from kilter.connect.script import find_program
from kilter.core.codec import write_atomically
from kilter.core.errors import NoDevice, UsageError
from kilter.core.label import Label
from kilter.core.units import (
    show_bytes,
    show_energy,
    show_fraction,
    show_time,
)
from kilter.device.find import find
from kilter.device.protocol import Device
from kilter.session.shared_clocks import SharedClocks
from kilter.sharing.messages import Summary
from kilter.sharing.plan.policies import SHARING_POLICIES
from kilter.sharing.plan.snapshot import TENTHS, shown
from kilter.sharing.store import default_file, living

Actions = Any
"""It stands for argparse's subparsers."""

_START_TIMEOUT_S = 60.0
_ADMISSION_S = 1.0


@argument
def _gpus(text: str) -> tuple[int, ...]:
    """`0-3` or `0,2`."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise UsageError(f"{text!r} are not GPUs: write 0-3 or 0,2")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    if not found or len(set(found)) < len(found) or len(found) > 64:
        raise UsageError(f"{text!r}: name 1 to 64 GPUs, each once")
    return tuple(found)


@argument
def _ratios(text: str) -> tuple[int, ...]:
    """`7,3`."""
    parts = text.split(",")
    if not all(part.isdigit() for part in parts) or sum(map(int, parts)) != TENTHS:
        raise UsageError(f"{text!r}: write tenths that sum to 10, such as 7,3")
    return tuple(map(int, parts))


def _parser(actions: Actions, name: str, description: str, epilog: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--endpoint",
        type=Path,
        default=default_file(),
        metavar="FILE",
        help="where daemon and jobs find each other (one file for each user)",
    )
    return parser


def add_serve(actions: Actions) -> None:
    parser = _parser(
        actions,
        "serve",
        "Decide the data ratios of all jobs on this machine, once a period, until Ctrl-C.\n"
        "Killed, it changes nothing: every job keeps its last ratio, and a new one takes over.",
        "examples:\n  kilter share serve --gpus 0-3 --policy maxmin --period 20s\n"
        "  kilter share serve --gpus 0,1 --policy thesis --out runs/shared\n",
    )
    parser.add_argument("--gpus", type=_gpus, metavar="0-3", help="(all that torch sees)")
    parser.add_argument("--policy", choices=SHARING_POLICIES, default="maxmin", help="(maxmin)")
    parser.add_argument("--period", type=seconds, default=20.0, metavar="T", help="(20s)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (loopback)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="share.html: the page, at the end")
    parser.add_argument(
        "--max-slowdown",
        type=fraction,
        metavar="2%",
        help="what lower clocks may cost a job that brings no contract of its own (without this "
        "the clocks stay as found while such a job runs)",
    )
    parser.add_argument(
        "--until-idle", type=seconds, metavar="T", help="end after this time without a job"
    )
    parser.set_defaults(act=_serve)


def _serve(args: argparse.Namespace) -> int:
    from kilter.sharing.daemon import Daemon

    gpus = args.gpus or _visible_gpus()
    devices = _meters(gpus, os.environ)
    clocks = SharedClocks(devices, args.max_slowdown, max(2 * args.period, 5.0))
    daemon = Daemon(args.endpoint, gpus, args.policy, args.period, args.host, devices, clocks)
    stopped: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stopped.append(number))
    names = ", ".join(map(str, gpus))
    print(
        f"kilter share: GPUs {names}, policy {args.policy}, every {show_time(args.period)}; "
        "Ctrl-C ends this, and every job keeps its ratio",
        file=sys.stderr,
        flush=True,
    )
    daemon.serve(
        lambda: bool(stopped),
        until_idle_s=args.until_idle,
        said=lambda line: print(line, file=sys.stderr, flush=True),
    )
    if args.out is not None:
        board = daemon.board
        facts = (f"GPUs {names}, policy {args.policy}, a period of {show_time(args.period)}",)
        text = page(
            "A shared machine",
            facts,
            board.stretches,
            board.decisions,
            Label.MEASURED,
            energy=board.energy,
        )
        write_atomically(args.out / "share.html", text.encode())
        print(f"kilter share: page {args.out / 'share.html'}", file=sys.stderr)
    return 0


def _meters(gpus: Sequence[int], environ: Mapping[str, str]) -> list[Device]:
    """The GPUs as NVML knows them, by the numbers that the jobs' CUDA gives them; a null device
    for one that is not there."""
    mask = environ.get("CUDA_VISIBLE_DEVICES")
    entries = None if mask is None else mask.split(",")
    return [
        find("auto", local_rank=0, environ={**environ, "CUDA_VISIBLE_DEVICES": entry})
        for gpu in gpus
        for entry in [str(gpu) if entries is None else "".join(entries[gpu : gpu + 1])]
    ]


def _visible_gpus() -> tuple[int, ...]:
    import importlib

    count = int(importlib.import_module("torch").cuda.device_count())
    if not count:
        raise NoDevice("torch sees no GPU here; to share CPU ranks, name them: --gpus 0-1")
    return tuple(range(count))


def add_run(actions: Actions) -> None:
    parser = _parser(
        actions,
        "run",
        "Run a training script, unmodified, with one rank for each GPU of the daemon.\n"
        "The script uses DistributedDataParallel and a DataLoader over a map-style data set.",
        "Everything after SCRIPT belongs to the script. Without a daemon, one is started and ends "
        "some time\nafter the last job.\n\nexamples:\n  kilter share run train.py --epochs 3\n"
        "  kilter share run --name resnet50 --idle-ranks -m package.train\n"
        "  kilter share run --ray --env HF_HOME train.py\n",
    )
    parser.usage = "kilter share run [options] SCRIPT|-m MODULE [ARGS...]"
    parser.add_argument("--name", help="of the job (the script's)")
    parser.add_argument("--gpus", type=_gpus, metavar="0-3", help="of a daemon to be started")
    parser.add_argument(
        "--idle-ranks",
        action="store_true",
        help="let ranks have ratio 0; the loop body of the script is then not run on them, so it "
        "must hold no collectives of its own and no counters that end the loop",
    )
    parser.add_argument("--total-steps", type=positive, metavar="N", help="the length of the job")
    parser.add_argument(
        "--alone-step",
        dest="alone_step_s",
        type=seconds,
        metavar="T",
        help="time of a step with all GPUs to itself",
    )
    parser.add_argument(
        "--max-slowdown",
        type=fraction,
        metavar="2%",
        help="what lower clocks of the shared GPUs may cost this job; 0: only what costs nothing",
    )
    parser.add_argument(
        "--probe",
        action="store_true",
        help="measure the run-alone time of a step once: the other jobs pause for it, 20 s at most",
    )
    parser.add_argument(
        "--ratios", type=_ratios, metavar="5,5", help="tenths for each GPU to begin with (even)"
    )
    parser.add_argument(
        "--memory",
        type=size,
        metavar="20GiB",
        help="what a rank needs of its GPU: wait until every GPU has that much free",
    )
    parser.add_argument(
        "--no-wait", action="store_true", help="with --memory: fail instead of waiting"
    )
    parser.add_argument("--min-samples", type=positive, metavar="N", help="of an active rank")
    parser.add_argument(
        "--ray",
        action="store_true",
        help="let the Ray cluster that runs here, or at RAY_ADDRESS, place and start the ranks",
    )
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="with --ray: a variable for the ranks, which else have those of Ray's workers",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name")
    parser.add_argument("command", nargs=argparse.PARSER, metavar="SCRIPT")
    parser.set_defaults(act=_run)


def _run(args: argparse.Namespace) -> Callable[[], object]:
    command = tuple(args.command)
    if command[0] == "--":
        command = command[1:]
    if args.module:
        command = ("-m", *command)
    if os.environ.get("KILTER") == "0":
        return functools.partial(run_without_kilter, command)
    _check(args)
    if args.ray:
        return _on_ray(args, command)
    find_program(command)
    options = _options(args, command)
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_torchrun_options(parser)
    launch = parser.parse_args(["--standalone", f"--nproc-per-node={len(options.gpus)}"])
    environment = worker_environment(options)
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, options.gpus))
    return functools.partial(run_shared, launch, worker_command(command), environment)


def _on_ray(args: argparse.Namespace, command: tuple[str, ...]) -> Callable[[], object]:
    """The nodes are asked whether the script is there."""
    variables, ray = named_variables(args.env, os.environ), connect()
    options = _options(args, command)
    script = None if args.module else command[0]
    job = RayJob.placed(ray, options.gpus, RankSite(os.getcwd(), script, options.endpoint))
    if job.unreached is not None:
        print(f"kilter share: {job.unreached}", file=sys.stderr, flush=True)
    variables |= worker_environment(msgspec.structs.replace(options, gpus=job.gpus))
    return functools.partial(job.run, worker_command(command), variables)


def _check(args: argparse.Namespace) -> None:
    """`UsageError` for options that do not go together."""
    if args.no_wait and args.memory is None:
        raise UsageError("--no-wait: say with --memory how much the job needs")
    if args.env and not args.ray:
        raise UsageError("--env: belongs to --ray; without it the ranks have the environment here")
    if args.probe and args.alone_step_s is not None:
        raise UsageError("--probe measures what --alone-step gives: leave one out")


def _options(args: argparse.Namespace, command: tuple[str, ...]) -> ShareOptions:
    """What the ranks are told; the daemon runs, and there is room for the job."""
    gpus = _daemon(args).gpus
    if args.ratios is not None and len(args.ratios) != len(gpus):
        raise UsageError(f"--ratios: give one number for each of the {len(gpus)} GPUs")
    if args.ratios is not None and not args.idle_ranks and 0 in args.ratios:
        raise UsageError("--ratios: a share of 0 needs --idle-ranks")
    if args.memory is not None:
        _admit(args)
    given = taken(args, (name for name in ShareOptions.__struct_fields__ if name in args))
    return ShareOptions(
        **given
        | {
            "endpoint": str(args.endpoint.resolve()),
            "name": args.name or Path(command[1] if args.module else command[0]).stem,
            "gpus": gpus,
        }
    )


def _admit(args: argparse.Namespace) -> None:
    """Wait, or fail, until every GPU of the daemon has the memory that the job asks for."""
    told = None
    while (lack := lacking(_daemon(args), args.memory)) is not None:
        if args.no_wait:
            raise NoDevice(f"{lack}; without --no-wait the job waits until there is room")
        if lack != told:
            print(f"kilter share: the job waits: {lack}", file=sys.stderr, flush=True)
            told = lack
        time.sleep(_ADMISSION_S)


def lacking(summary: Summary, need_bytes: int) -> str | None:
    """Which GPU has too little free memory, as a sentence; None if none, or if nobody knows."""
    for gpu, free in zip(summary.gpus, summary.free_bytes, strict=False):
        if free is not None and free < need_bytes:
            jobs = ", ".join(job.name for job in summary.jobs)
            beside = f" beside {jobs}" if jobs else ""
            return (
                f"GPU {gpu} has {show_bytes(free)} free{beside}, and the job needs "
                f"{show_bytes(need_bytes)} on each"
            )
    return None


def _daemon(args: argparse.Namespace) -> Summary:
    """The daemon that runs, or a new one."""
    found = living(args.endpoint)
    if found is not None:
        if args.gpus is not None and args.gpus != found[1].gpus:
            raise UsageError(
                f"--gpus: the daemon that runs shares GPUs {', '.join(map(str, found[1].gpus))}; "
                "leave --gpus out"
            )
        return found[1]
    gpus = args.gpus or _visible_gpus()
    subprocess.Popen(
        [
            *(sys.executable, "-m", "kilter", "share", "serve", "--until-idle", "60s"),
            *("--gpus", ",".join(map(str, gpus)), "--endpoint", str(args.endpoint)),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + _START_TIMEOUT_S
    while (found := living(args.endpoint)) is None:
        if time.monotonic() > deadline:
            raise NoDevice("the daemon does not start; try it in a terminal: kilter share serve")
        time.sleep(0.1)
    return found[1]


def add_top(actions: Actions) -> None:
    parser = _parser(
        actions,
        "top",
        "Show the jobs on this machine, live: slow-downs, ratios, utilisation, last decisions.",
        "examples:\n  kilter share top\n  kilter share top --json\n",
    )
    parser.add_argument("--once", action="store_true", help="print once and end")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(act=_top)


def _top(args: argparse.Namespace) -> int:
    summary = _summary(args.endpoint)
    if args.json:
        print_json("kilter.share-top/1", Label.MEASURED, msgspec.to_builtins(summary))
        return 0
    if args.once or not sys.stdout.isatty():
        print(table(summary))
        return 0
    show_live(lambda: table(_summary(args.endpoint)), otherwise="kilter share top --once")
    return 0


def _summary(endpoint: Path) -> Summary:
    found = living(endpoint)
    if found is None:
        raise NoDevice(f"no daemon answers at {endpoint}; start one: kilter share serve")
    return found[1]


def table(summary: Summary) -> str:
    """The summary as text."""
    lines = [
        f"kilter share: policy {summary.policy}, every {show_time(summary.period_s)}, "
        f"process {summary.pid}",
        "  ".join(
            f"GPU {gpu}: {show_fraction(busy)} busy"
            for gpu, busy in zip(summary.gpus, summary.utilisation, strict=True)
        ),
    ]
    if metered := [energy_j for energy_j in summary.energy_j if energy_j is not None]:
        lines.append(
            f"energy since the daemon began: {show_energy(sum(metered))}, of which "
            f"{show_energy(summary.unshared_energy_j)} while no job was there"
        )
    if summary.clocks is not None:
        lines.append(summary.clocks)
    width = max((len(job.name) for job in summary.jobs), default=3)
    lines.append(
        f"{'job':<{width}}  state    iteration  step      slow-down  energy    ratio in tenths"
    )
    for job in summary.jobs:
        slow = "unknown" if job.slowdown is None else f"{job.slowdown:.2f} ({job.alone_source})"
        lines.append(
            f"{job.name:<{width}}  {job.state:<7}  {job.iteration:>9}  {show_time(job.step_s):<8}  "
            f"{slow:<9}  {show_energy(job.energy_j):<8}  {shown(job.ratios)}"
        )
    lines += [f"{job.name}: {job.note}" for job in summary.jobs if job.note is not None]
    return "\n".join([*lines, "", *summary.decisions])
