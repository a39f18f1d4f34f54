"""`kilter share run --ray`: a Ray cluster places and starts the ranks of a job.

One rank for each GPU of the daemon, in a placement group that ends with the job. Ray keeps no two
ranks of a job from the same part of a GPU, so GPUs that several jobs are to share are offered by
name (`kilter_gpu_0` ...: as many units as jobs may share that GPU); without such names each rank
gets a whole GPU of Ray's. The ranks are processes of the actors of `ray_rank`, with the environment
that torchrun would give them. Ray is imported late: it is an extra.
"""

from __future__ import annotations

import contextlib
import importlib
import ipaddress
import secrets
import signal
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import msgspec

from kilter.connect.ray_rank import RankProcess, RankSite
from kilter.core.errors import FileError, NoDevice, UsageError

SHARED = "kilter_gpu_"
"""How the names of resources begin that offer a GPU for sharing; its number on the node follows."""
PLACEMENT_TIMEOUT_S = 30.0
"""For so long a job waits for GPUs that others hold."""
_ANSWER_TIMEOUT_S = 120.0
_INTERRUPTED = 128 + signal.SIGINT


class RayNode(msgspec.Struct, frozen=True):
    """A living node of the cluster."""

    address: str
    resources: dict[str, float]

    def shared(self) -> list[int]:
        """The GPUs that are offered for sharing, by CUDA's number on this node."""
        names = (name.removeprefix(SHARED) for name in self.resources if name.startswith(SHARED))
        return sorted(int(name) for name in names if name.isdigit())

    def gpus(self) -> int:
        """How many numbers of the daemon its GPUs take."""
        shared = self.shared()
        return shared[-1] + 1 if shared else int(self.resources.get("GPU", 0))


class RankPlace(msgspec.Struct, frozen=True):
    """The GPU of one rank: by CUDA's number on the node, and by the daemon's."""

    address: str
    gpu: int
    number: int


def first_numbers(nodes: Sequence[RayNode]) -> dict[str, int]:
    """The daemon's number of each node's first GPU: nodes count in the order of their addresses."""
    found, number = {}, 0
    for node in sorted(nodes, key=lambda node: _order(node.address)):
        found[node.address] = number
        number += node.gpus()
    return found


def bundles(nodes: Sequence[RayNode], gpus: Sequence[int]) -> list[dict[str, float]]:
    """What is asked of Ray for a rank on each of these GPUs (the daemon's numbers); `NoDevice` if
    the cluster has too few."""
    first = first_numbers(nodes)
    offered = {
        first[node.address] + gpu: {f"{SHARED}{gpu}": 1.0, f"node:{node.address}": 0.001}
        for node in nodes
        for gpu in node.shared()
    }
    if offered:
        if missing := [gpu for gpu in gpus if gpu not in offered]:
            raise NoDevice(
                f"the Ray cluster offers {_gpus(offered)} for sharing, and the daemon shares "
                f"{_gpus(missing)} as well; start the daemon with --gpus of those that are offered"
            )
        return [offered[gpu] for gpu in gpus]
    there = sum(node.gpus() for node in nodes)
    if there < len(gpus):
        raise NoDevice(
            f"the Ray cluster has {there} GPU{'' if there == 1 else 's'}, and the job needs "
            f"{len(gpus)}, one for each GPU of the daemon (kilter share serve --gpus)"
        )
    return [{"GPU": 1.0} for _ in gpus]


def ranks_in_order(places: Sequence[RankPlace], own_address: str) -> list[int]:
    """Positions in `places` by rank: this machine first, so that rank 0 is beside the daemon if
    that is possible, then node by node."""
    return sorted(
        range(len(places)),
        key=lambda i: (
            places[i].address != own_address,
            _order(places[i].address),
            places[i].gpu,
        ),
    )


def environments(places: Sequence[RankPlace], port: int, run: str) -> list[dict[str, str]]:
    """What torchrun would tell each rank, in the order of the ranks; those of a node follow each
    other. All ranks of a node see all GPUs of the job there, as under torchrun."""
    nodes = list(dict.fromkeys(place.address for place in places))
    on_node = Counter(place.address for place in places)
    seen: Counter[str] = Counter()
    found = []
    for rank, place in enumerate(places):
        numbers = {
            "RANK": rank,
            "LOCAL_RANK": seen[place.address],
            "GROUP_RANK": nodes.index(place.address),
            "ROLE_RANK": rank,
            "WORLD_SIZE": len(places),
            "LOCAL_WORLD_SIZE": on_node[place.address],
            "GROUP_WORLD_SIZE": len(nodes),
            "ROLE_WORLD_SIZE": len(places),
            "MASTER_PORT": port,
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 0,
        }
        visible = [str(other.gpu) for other in places if other.address == place.address]
        found.append(
            {name: str(number) for name, number in numbers.items()}
            | {
                "MASTER_ADDR": places[0].address,
                "ROLE_NAME": "default",
                "TORCHELASTIC_RUN_ID": run,
                "CUDA_VISIBLE_DEVICES": ",".join(visible),
            }
        )
        seen[place.address] += 1
    return found


def named_variables(named: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """`NAME=VALUE` as it is, `NAME` with the value that it has here; and kilter's own variables."""
    found = {name: value for name, value in environ.items() if name.startswith("KILTER_")}
    for each in named:
        name, equals, value = each.partition("=")
        if not equals and name not in environ:
            raise UsageError(f"--env {name}: there is no such variable here; write {name}=VALUE")
        found[name] = value if equals else environ[name]
    return found


def connect() -> Any:
    """The module `ray`, in a cluster that runs."""
    try:
        ray = importlib.import_module("ray")
        importlib.import_module("ray.util.scheduling_strategies")
    except ImportError as error:
        raise NoDevice(f"--ray needs Ray ({error}): pip install kilter[ray]") from error
    try:
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise NoDevice(
            f"no Ray cluster answers ({reason}); start one with: ray start --head; or name "
            "one by RAY_ADDRESS"
        ) from error
    return ray


class RayJob:
    """The ranks of one job, placed. `run` trains; until then nothing of the script has run."""

    def __init__(self, ray: Any, group: Any) -> None:
        """In this placement group."""
        self._ray, self._group = ray, group

    @classmethod
    def placed(
        cls, ray: Any, gpus: Sequence[int], site: RankSite, timeout_s: float = PLACEMENT_TIMEOUT_S
    ) -> RayJob:
        """Place a rank on each of the daemon's GPUs and look at their nodes. Raises `NoDevice` if
        there are too few GPUs, `FileError` where the script is missing."""
        nodes = [
            RayNode(node["NodeManagerAddress"], dict(node["Resources"]))
            for node in ray.nodes()
            if node["Alive"]
        ]
        asked = bundles(nodes, gpus)
        job = cls(ray, ray.util.placement_group(asked, strategy="PACK"))
        with ExitStack() as failed:
            failed.callback(job._give_back)
            job._place(asked, nodes, gpus, site, timeout_s)
            failed.pop_all()
        return job

    def _place(
        self,
        asked: Sequence[dict[str, float]],
        nodes: Sequence[RayNode],
        gpus: Sequence[int],
        site: RankSite,
        timeout_s: float,
    ) -> None:
        ray = self._ray
        if not self._group.wait(timeout_s):
            free = sum(v for k, v in ray.available_resources().items() if k in asked[0])
            raise NoDevice(
                f"the Ray cluster has no room for {len(asked)} ranks within {timeout_s:.0f} s: "
                f"other jobs hold its GPUs ({free:.4g} of {next(iter(asked[0]))} is free)"
            )
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        actor = ray.remote(RankProcess)
        actors = [
            actor.options(
                num_cpus=0,
                num_gpus=bundle.get("GPU", 0),
                max_concurrency=2,  # `stop` while `read` waits
                scheduling_strategy=strategy(self._group, i),
            ).remote()
            for i, bundle in enumerate(asked)
        ]
        try:
            where = ray.get([a.where.remote() for a in actors], timeout=_ANSWER_TIMEOUT_S)
            found = ray.get([a.look.remote(site) for a in actors], timeout=_ANSWER_TIMEOUT_S)
        except ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[-1]
            raise NoDevice(
                f"a node of the Ray cluster does not start a rank ({reason}); install the same "
                "kilter and torch on all nodes"
            ) from error
        first, places = first_numbers(nodes), []
        for bundle, (address, given), seen in zip(asked, where, found, strict=True):
            names = [name.removeprefix(SHARED) for name in bundle if name.startswith(SHARED)]
            gpu = int((names or given)[0])
            places.append(RankPlace(address, gpu, first[address] + gpu))
            if seen.missing is not None:
                raise FileError(
                    f"{seen.missing}: not on the node {address}; put it there under the same "
                    "path (a shared file system)"
                )
        self.places = places
        if strangers := [p.number for p in places if p.number not in gpus]:
            raise NoDevice(
                f"Ray gives the job {_gpus(strangers)}, which the daemon does not share; start the "
                "daemon with --gpus of the whole cluster"
            )
        order = ranks_in_order(places, ray.util.get_node_ip_address())
        self.places = [places[i] for i in order]
        self._actors = [actors[i] for i in order]
        self._sites = [found[i] for i in order]

    @property
    def gpus(self) -> tuple[int, ...]:
        """The daemon's number of each rank's GPU."""
        return tuple(place.number for place in self.places)

    @property
    def unreached(self) -> str | None:
        """Why the process of rank 0 cannot speak with the daemon, as a sentence."""
        if (why := self._sites[0].unreached) is None:
            return None
        return (
            f"rank 0 runs on {self.places[0].address} and does not reach the daemon ({why}), so "
            "the data ratio stays as it is; start the daemon with --host ADDRESS, which that node "
            "can reach, and put its file there under the same path, readable by its owner only"
        )

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """Start `python -u COMMAND` on every rank, hand its output on and wait for the end. Returns
        the exit code of the first rank that fails; the others are stopped then. Ctrl-C and SIGTERM
        stop all."""
        before = signal.signal(signal.SIGTERM, _interrupt)
        try:
            return self._run(command, environment)
        finally:
            self._give_back()
            signal.signal(signal.SIGTERM, before)

    def _run(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        ray = self._ray
        port, run = self._sites[0].free_port, secrets.token_hex(8)
        own = environments(self.places, port, run)
        codes: dict[int, int] = {}
        waiting: dict[Any, int] = {}
        """Answers to come -> rank."""
        try:
            ray.get(
                [
                    actor.start.remote(tuple(command), {**environment, **mine})
                    for actor, mine in zip(self._actors, own, strict=True)
                ]
            )
            waiting.update({actor.read.remote(): i for i, actor in enumerate(self._actors)})
            self._follow(waiting, codes, until_failure=True)
        except KeyboardInterrupt:
            codes = {-1: _INTERRUPTED, **codes}
        failed = [code for code in codes.values() if code]
        if failed:
            stops = [actor.stop.remote() for actor in self._actors]
            self._follow(waiting, codes, until_failure=False)
            # What was interrupted as it started has nothing to follow, and ends all the same.
            for stop in stops:
                with contextlib.suppress(ray.exceptions.RayError):
                    ray.get(stop)
        return failed[0] if failed else 0

    def _follow(
        self, waiting: dict[Any, int], codes: dict[int, int], *, until_failure: bool
    ) -> None:
        """Hand on what the ranks write until all have ended, or until one has failed."""
        ray = self._ray
        while waiting and not (until_failure and any(codes.values())):
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=1.0)
            for answer in ready:
                rank = waiting.pop(answer)
                try:
                    written, code = ray.get(answer)
                except ray.exceptions.RayError:
                    codes[rank] = 1
                    _tell(f"rank {rank} is lost, with its node {self.places[rank].address}")
                    continue
                for stream, text in written:
                    _write(stream, text)
                if code is None:
                    waiting[self._actors[rank].read.remote()] = rank
                else:
                    codes[rank] = code if code >= 0 else 128 - code

    def _give_back(self) -> None:
        """The GPUs are Ray's again; what still runs on them ends."""
        self._ray.util.remove_placement_group(self._group)
        self._ray.shutdown()


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _write(stream: str, text: bytes) -> None:
    target = sys.stdout if stream == "stdout" else sys.stderr
    if target is not None:
        target.buffer.write(text)
        target.flush()


def _tell(text: str) -> None:
    if sys.stderr is not None:
        print(f"kilter share: {text}", file=sys.stderr, flush=True)


def _gpus(numbers: Sequence[int] | Mapping[int, object]) -> str:
    ordered = sorted(numbers)
    return f"GPU{'' if len(ordered) == 1 else 's'} {', '.join(map(str, ordered))}"


def _order(address: str) -> tuple[int, str]:
    """10.0.0.9 before 10.0.0.10; names in the order of letters."""
    try:
        return int(ipaddress.ip_address(address)), ""
    except ValueError:
        return 0, address
