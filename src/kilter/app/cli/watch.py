"""`kilter watch`: a job that kilter did not start, governed from outside by telemetry alone."""

from __future__ import annotations

import argparse
import math
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kilter.app.cli.output import print_json
from kilter.app.config import DEFAULT_MAX_SLOWDOWN, OPTIONS, resolve
from kilter.app.listener import StderrListener
from kilter.core.errors import UsageError
from kilter.core.ranks import Ranks
from kilter.core.units import parse_seconds
from kilter.session.options import Options
from kilter.session.run_directory import check_out, make_out

if TYPE_CHECKING:
    from kilter.session.watch import WatchedJob, WatchEnd

HELP = """\
Govern a job that kilter did not start, in any framework, language or container, from outside: less
energy under the same contract as `kilter run`. What an iteration is, and how long it takes, follows
from the period of the GPU's power and utilisation. Where they show no period (iterations shorter
than two readings of the sensors, which is 200 ms on an H200), nothing is set.
"""

EPILOG = """\
The watch ends, with the settings as they were found, when the job or the process of --pid ends,
when another process comes onto the GPU, after --for, and on Ctrl-C. --max-slowdown, --objective,
--device, --dry-run, --out and --json are read from the environment and from kilter.toml as by
kilter run.

On a simulated GPU (--device sim:NAME) a simulated training job is watched in virtual time.

examples:
  kilter watch --gpu 0                          whatever runs on GPU 0
  kilter watch --pid 4242 --max-slowdown 1%     the GPU on which this process computes
  kilter watch --gpu 0 --dry-run                is there a period, and what would be tried?
  kilter watch --device sim:v100 --for 30min    a simulated job on a simulated GPU
"""

_SHARED = ("max-slowdown", "objective", "price-of-time", "device", "dry-run", "out", "json")
"""These options of `kilter run` mean the same here."""
SIMULATED_S = 3600.0
"""How long a simulated job is watched, in its own time, without --for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "kilter watch [--gpu I] [--pid P] [options]"
    parser.add_argument(
        "--gpu", metavar="I", help="the GPU, by its number in nvidia-smi or its UUID"
    )
    parser.add_argument(
        "--pid", type=int, metavar="P", help="a process of the job; the GPU is found by it"
    )
    parser.add_argument(
        "--for", dest="seconds", metavar="10min", help="the longest time to watch (default: no end)"
    )
    helps = {
        "device": "auto (default), nvml, or sim:NAME",
        "dry-run": "observe, say what would be tried, and end",
        "json": "one JSON object on standard output at the end",
        "max-slowdown": "the contract (0 = only free savings; default: 2%%)",
    }
    for name in _SHARED:
        OPTIONS[name].add_to(parser, helps.get(name))


def run(arguments: argparse.Namespace) -> int:
    from kilter.session.watch import watch

    if os.environ.get("KILTER") == "0":
        raise UsageError("KILTER=0 in the environment switches kilter off: nothing is watched")
    seconds = _seconds(arguments.seconds)
    options = _options(arguments)
    check_out(options.out, Ranks())
    stop = threading.Event()
    source = _source(arguments, options, seconds, stop)
    before = {
        number: signal.signal(number, lambda *_: stop.set())
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        if options.out is not None:
            make_out(options.out)
        end = watch(source, replace(options, json_summary=False), StderrListener())
    finally:
        source.close()
        for number, handler in before.items():
            signal.signal(number, handler)
    if options.json_summary:
        report = (end.run / "report.json").read_bytes()
        label = msgspec.json.decode(report)["label"]
        print_json("kilter.watch/1", label, _found(end) | {"report": msgspec.Raw(report)})
    return 1 if end.failed else 0


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        seconds = parse_seconds(text)
    except UsageError as error:
        raise UsageError(f"--for: {error}") from None
    if seconds <= 0.0:
        raise UsageError(f"--for {text}: must be longer than nothing")
    return seconds


def _options(arguments: argparse.Namespace) -> Options:
    """As of `kilter run`, of which those for other capabilities are left aside."""
    flags = {name: getattr(arguments, name.replace("-", "_")) for name in _SHARED}
    options = resolve(flags, os.environ, Path.cwd(), ("kilter", "watch"))
    kind = options.device.partition(":")[0]
    if kind not in ("auto", "nvml", "sim"):
        raise UsageError(f"--device {options.device}: only a GPU or sim:NAME can be watched")
    if kind == "sim" and (arguments.gpu is not None or arguments.pid is not None):
        raise UsageError("--gpu and --pid name a real job; --device sim:NAME brings its own")
    bound = options.goal.max_slowdown
    goal = replace(
        options.goal,
        max_slowdown=DEFAULT_MAX_SLOWDOWN if bound is None else bound,
        memory_budget=None,
        host_memory_bytes=None,
    )
    given = [f"--{name} {v}" for name in ("gpu", "pid") if (v := getattr(arguments, name))]
    command = ("kilter", "watch", *" ".join(given).split())
    return replace(options, goal=goal, command=command)


def _source(
    arguments: argparse.Namespace, options: Options, seconds: float | None, stop: threading.Event
) -> WatchedJob:
    kind, _, name = options.device.partition(":")
    if kind == "sim":
        from kilter.app.simulated_training import simulated_training

        return simulated_training(name, stop=stop, seconds=seconds or SIMULATED_S)
    from kilter.session.watched_gpu import WatchedGpu, choose_gpu

    return WatchedGpu(
        choose_gpu(arguments.gpu, arguments.pid),
        pid=arguments.pid,
        seconds=seconds or math.inf,
        stop=stop,
        environ=os.environ,
    )


def _found(end: WatchEnd) -> dict[str, Any]:
    detection, rhythm = end.detection, end.rhythm
    return {
        "run": str(end.run),
        "ended": end.reason or None,
        "detected": rhythm is not None,
        "code": None if detection is None else detection.code,
        "reason": end.verdict if detection is None else detection.reason,
        "period_s": None if rhythm is None else rhythm.pace.iteration_s,
        "period_error_s": None if rhythm is None else rhythm.pace.error_s,
        "jitter_s": None if rhythm is None else rhythm.pace.jitter_s,
        "edge_s": None if rhythm is None else rhythm.pace.edge_s,
        "block_iterations": None if rhythm is None else rhythm.block_iterations,
        "pair_error": None if rhythm is None else rhythm.pair_error,
        "would_try": end.tries,
    }
