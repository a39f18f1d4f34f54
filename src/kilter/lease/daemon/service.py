"""The daemon itself: connections, leases on GPUs, deadlines. The connection is the lease.

One event loop for all connections and one thread for each GPU, since a driver call may hang. What a
client can cause is bounded: connections in all and of each user, bytes of a message, messages a
second, seconds until a message is there, and how long a setting outlives a hanging client.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kilter.core.daemon_protocol import (
    MAX_MESSAGE_BYTES,
    MAX_TEXT,
    VERSION,
    Answer,
    Ask,
    DaemonRequest,
    Grant,
    Hello,
    Hold,
    Look,
    Release,
    encode,
    read_request,
)
from kilter.core.errors import DeviceError, FileError, Held, NoDevice, NotPermitted
from kilter.core.reasons import Reason
from kilter.device.nvidia import NvidiaDevice, survey
from kilter.lease.daemon.audit import Audit
from kilter.lease.daemon.holding import Holding
from kilter.lease.daemon.peers import Peer, death_of, occupancy_refusal, peer_of, user_of
from kilter.lease.daemon.policy import DaemonPolicy, User, decide, is_named

T = TypeVar("T")

QUIET_S = 60.0
"""A client without a lease that says nothing for so long is disconnected; it may come again."""
CLIENT_ANSWER_S = 5.0
"""How long a client may take to read an answer."""
AGAIN_S = 5.0
"""Wait before a GPU is tried again that could not be put back."""
SURVEY_S = 10.0
"""GPUs are listed anew at most so often."""
USERS_KNOWN_S = 60.0
"""How long an answer of the account database is good."""


@dataclass(slots=True, eq=False)
class Client:
    peer: Peer
    user: User
    program: str = ""
    number: int = 0
    """The last request had this number."""


@dataclass(slots=True)
class RateBucket:
    """How many messages a user may still send at once."""

    tokens: float
    at_s: float


OTHERS = "others"
"""It stands in place of the names of users whom the policy does not name: those may be any
number."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """What was done since the daemon began, by user."""

    sets: Counter[str] = field(default_factory=Counter)
    restores: Counter[str] = field(default_factory=Counter)
    refusals: Counter[tuple[str, str]] = field(default_factory=Counter)
    """They are counted by the name of the error as well."""
    energy_j: dict[str, float] = field(default_factory=dict)
    """Each GPU has used this while under leases, as far as it has been counted."""


@dataclass(slots=True, eq=False)
class GovernedGpu:
    """One GPU, its thread, and who has the lease."""

    holding: Holding
    thread: ThreadPoolExecutor
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    client: Client | None = None
    timer: asyncio.TimerHandle | None = None
    billed_j: float = 0.0
    """The present lease has so much in the ledger."""
    stuck: bool = False
    """What was found could not be put back yet."""

    async def do(self, act: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.thread, act)

    def disarm(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Service:
    """Serves one socket until it is cancelled; then everything is put back."""

    def __init__(
        self, policy: DaemonPolicy, directory: Path, machine: Path | None, audit: Audit
    ) -> None:
        self.policy = policy
        """May be replaced while the service runs; leases in force stay."""
        self._directory = directory
        self._machine = machine
        self._audit = audit
        self._gpus: dict[str, GovernedGpu] = {}
        self._surveyed_s = -math.inf
        self._survey_turn = asyncio.Lock()
        self._connections: dict[int, int] = {}
        """Each user has so many open."""
        self._buckets: dict[int, RateBucket] = {}
        self._users: dict[int, tuple[float, User]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.ledger = Ledger()

    async def serve(self, listener: Any, ready: Callable[[], None]) -> None:
        """`listener` is a listening Unix socket. Returns only by cancellation."""
        server = await asyncio.start_unix_server(
            self._connected, sock=listener, limit=MAX_MESSAGE_BYTES
        )
        ready()
        try:
            await server.serve_forever()
        finally:
            server.close()
            for gpu in self._gpus.values():
                await self._let_go(gpu, "the daemon ends")

    def leases(self) -> list[tuple[Client, Holding]]:
        gpus = list(self._gpus.values())
        return [(client, gpu.holding) for gpu in gpus if (client := gpu.client) is not None]

    # Connections ----------------------------------------------------------------------------

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            peer = peer_of(writer.get_extra_info("socket"))
        except OSError:
            writer.transport.abort()
            return
        limits, uid = self.policy.limits, peer.uid
        mine = self._connections.get(uid, 0)
        if mine >= limits.connections_per_user or (
            sum(self._connections.values()) >= limits.connections
        ):
            writer.transport.abort()
            return
        self._connections[uid] = mine + 1
        death = death_of(peer)
        loop = asyncio.get_running_loop()
        if death is not None:
            loop.add_reader(death, writer.transport.abort)
        client = Client(peer=peer, user=User(uid=uid, name=str(uid)))
        try:
            client.user = await self._user(uid)
            await self._converse(client, reader, writer)
        except (OSError, EOFError, TimeoutError, ValueError, asyncio.LimitOverrunError):
            pass  # whatever it was, this connection is over, and no other one is affected
        finally:
            if death is not None:
                loop.remove_reader(death)
                _close(death)
            await self._forget(client)
            self._connections[uid] -= 1
            if not self._connections[uid]:
                del self._connections[uid]
            writer.transport.abort() if writer.is_closing() else writer.close()

    async def _converse(
        self, client: Client, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        hello = await self._next(client, reader)
        if not isinstance(hello, Hello):
            raise ValueError("the first message is not a greeting")
        if hello.version != VERSION:
            text = f"this daemon speaks version {VERSION} of the protocol, not {hello.version}"
            await _send(writer, Answer(error="NotSupported", text=text))
            return
        client.program = hello.program[:MAX_TEXT]
        await _send(writer, Answer())
        while True:
            request = await self._next(client, reader)
            if isinstance(request, Hello) or request.number <= client.number:
                raise ValueError("repeated or out of order")
            client.number = request.number
            try:
                answer = await self._answer(client, request)
            except (DeviceError, FileError) as error:
                answer = Answer(error=type(error).__name__, text=str(error))
                named = is_named(self.policy, client.user)
                self.ledger.refusals[
                    client.user.name if named else OTHERS, type(error).__name__
                ] += 1
            await _send(writer, _numbered(answer, request.number))

    async def _next(self, client: Client, reader: asyncio.StreamReader) -> DaemonRequest:
        """The next message, at the pace that one user's connections have together."""
        await self._pace(client.peer.uid)
        leased = any(gpu.client is client for gpu in self._gpus.values())
        # With a lease its deadline says how long a client may be quiet.
        async with asyncio.timeout(None if leased else QUIET_S):
            line = await reader.readuntil(b"\n")
        return read_request(line)

    async def _pace(self, uid: int) -> None:
        rate = self.policy.limits.messages_per_s
        now_s = time.monotonic()
        bucket = self._buckets.get(uid)
        if bucket is None:
            full = [key for key, one in self._buckets.items() if now_s - one.at_s > 1.0]
            for key in full:
                del self._buckets[key]
            bucket = self._buckets[uid] = RateBucket(tokens=rate, at_s=now_s)
        bucket.tokens = min(rate, bucket.tokens + (now_s - bucket.at_s) * rate) - 1.0
        bucket.at_s = now_s
        if bucket.tokens < 0.0:
            await asyncio.sleep(-bucket.tokens / rate)

    async def _user(self, uid: int) -> User:
        """The account database may be far away, and is not asked in the event loop."""
        known = self._users.get(uid)
        if known is not None and time.monotonic() - known[0] < USERS_KNOWN_S:
            return known[1]
        user = await asyncio.get_running_loop().run_in_executor(None, user_of, uid)
        if len(self._users) > 4096:
            self._users.clear()
        self._users[uid] = (time.monotonic(), user)
        return user

    # Requests -------------------------------------------------------------------------------

    async def _answer(self, client: Client, request: DaemonRequest) -> Answer:
        assert not isinstance(request, Hello)
        gpu = await self._gpu(request.uuid)
        if isinstance(request, Look):
            return Answer(grant=await self._granted(client, gpu))
        async with gpu.turn:
            if isinstance(request, Ask):
                return await self._ask(client, gpu, request)
            if gpu.client is not client:
                return Answer()
            if isinstance(request, Release):
                await self._put_back(gpu, "released")
                return Answer()
            return await self._hold(client, gpu, request)

    async def _granted(self, client: Client, gpu: GovernedGpu) -> Grant:
        """What the policy gives this user on this GPU. Raises `NotPermitted`."""
        decision = decide(self.policy, client.user, gpu.holding.uuid)
        if isinstance(decision, Reason):
            raise NotPermitted(f"kilter daemon: {decision}")
        info = await gpu.do(gpu.holding.device.info)
        if not info.can_set:
            raise NotPermitted(f"kilter daemon: {info.refusal}")
        return decision

    async def _ask(self, client: Client, gpu: GovernedGpu, request: Ask) -> Answer:
        grant = await self._granted(client, gpu)
        refusal = grant.refusal(request.setting)
        if refusal is not None:
            raise NotPermitted(f"kilter daemon: {refusal}")
        if gpu.client is not client:
            self._check_free(client, gpu, grant)
        gpu.client = client
        hold_s = min(request.hold_s, grant.longest_hold_s)
        gpu.disarm()
        try:
            await gpu.do(partial(self._set, client, gpu.holding, request, hold_s))
        except (DeviceError, FileError) as error:
            await self._put_back(gpu, f"not set: {error}")
            raise
        self.ledger.sets[client.user.name] += 1
        self._arm(gpu, client, hold_s)
        return Answer(found=gpu.holding.found, held=True)

    def _check_free(self, client: Client, gpu: GovernedGpu, grant: Grant) -> None:
        uuid = gpu.holding.uuid
        if gpu.stuck:
            raise DeviceError(f"{uuid}: what was found could not be put back yet; tried again")
        if gpu.client is not None:
            raise Held(f"{uuid}: another process controls this GPU; one kilter per GPU")
        held = sum(
            one.client is not None and one.client.peer.uid == client.peer.uid
            for one in self._gpus.values()
        )
        if held >= grant.gpus_at_once:
            raise NotPermitted(
                f"kilter daemon: the operator's policy gives you {grant.gpus_at_once} GPUs at once"
            )

    def _set(self, client: Client, holding: Holding, request: Ask, hold_s: float) -> None:
        """In the GPU's thread."""
        _check_occupants(holding, client.peer)
        if not holding.held:
            holding.take()
        self._audit.write(
            "set",
            **_who(client),
            gpu=holding.uuid,
            setting=request.setting,
            hold_s=hold_s,
            why=request.why[:MAX_TEXT],
        )
        holding.set(request.setting)

    async def _hold(self, client: Client, gpu: GovernedGpu, request: Hold) -> Answer:
        def look() -> None:
            _check_occupants(gpu.holding, client.peer)
            gpu.holding.look()

        try:
            grant = await self._granted(client, gpu)
            await gpu.do(look)
        except (DeviceError, FileError) as error:
            await self._put_back(gpu, str(error))
            raise
        self._bill(gpu, client)
        self._arm(gpu, client, min(request.hold_s, grant.longest_hold_s))
        return Answer(found=gpu.holding.found, held=True)

    # The way back ---------------------------------------------------------------------------

    def _arm(self, gpu: GovernedGpu, client: Client, hold_s: float) -> None:
        gpu.disarm()
        gpu.timer = asyncio.get_running_loop().call_later(
            hold_s, lambda: self._start(self._expire(gpu, client))
        )

    async def _expire(self, gpu: GovernedGpu, client: Client) -> None:
        async with gpu.turn:
            # A request that came at the last moment has armed another timer meanwhile.
            now_s, timer = asyncio.get_running_loop().time(), gpu.timer
            if gpu.client is client and timer is not None and timer.when() <= now_s:
                await self._put_back(gpu, "the deadline has passed")

    async def _forget(self, client: Client) -> None:
        for gpu in self._gpus.values():
            if gpu.client is client:
                await self._let_go(gpu, "the connection has ended", client)

    async def _let_go(self, gpu: GovernedGpu, why: str, client: Client | None = None) -> None:
        async with gpu.turn:
            if gpu.client is not None and client in (None, gpu.client):
                await self._put_back(gpu, why)

    async def _put_back(self, gpu: GovernedGpu, why: str) -> None:
        """The caller has the turn. Whoever had the lease has it no more."""
        gpu.disarm()
        client, gpu.client = gpu.client, None
        who: Mapping[str, Any] = {} if client is None else _who(client)
        found = gpu.holding.found
        try:
            outcome = await gpu.do(gpu.holding.put_back)
        except (DeviceError, FileError) as error:
            if not gpu.stuck:
                gpu.stuck = True
                self._start(self._try_again(gpu))
            self._audit.note(
                "not restored", **who, gpu=gpu.holding.uuid, why=why, reason=str(error)
            )
            return
        finally:
            self._bill(gpu, client)
        gpu.stuck = False
        if client is not None and outcome.found is not None:  # something was set
            self.ledger.restores[client.user.name] += 1
        self._audit.note(
            "restored",
            **who,
            gpu=gpu.holding.uuid,
            found=found,
            why=why,
            state=outcome.state,
            reason=outcome.reason,
        )

    def _bill(self, gpu: GovernedGpu, client: Client | None) -> None:
        """Add to the user's energy what was counted since the last time, and begin anew where the
        lease has ended."""
        used_j, energy_j = gpu.holding.energy_j or 0.0, self.ledger.energy_j
        if client is not None:
            name = client.user.name
            energy_j[name] = energy_j.get(name, 0.0) + max(0.0, used_j - gpu.billed_j)
        gpu.billed_j = used_j
        if gpu.client is None:
            gpu.holding.energy_j, gpu.billed_j = None, 0.0

    async def _try_again(self, gpu: GovernedGpu) -> None:
        while gpu.stuck:
            await asyncio.sleep(AGAIN_S)
            async with gpu.turn:
                await self._put_back(gpu, "tried again")

    def _start(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # GPUs -----------------------------------------------------------------------------------

    async def _gpu(self, uuid: str) -> GovernedGpu:
        """Only what the driver lists gets a thread: a client may name anything. Raises
        `NoDevice`."""
        async with self._survey_turn:
            if uuid not in self._gpus and time.monotonic() - self._surveyed_s >= SURVEY_S:
                await self._survey()
        if uuid not in self._gpus:
            raise NoDevice(f"kilter daemon: no GPU {uuid!r} on this machine")
        return self._gpus[uuid]

    async def _survey(self) -> None:
        self._surveyed_s = time.monotonic()
        seen = await asyncio.get_running_loop().run_in_executor(None, survey)
        for one in seen.gpus:
            if one.uuid and one.uuid not in self._gpus:
                self._gpus[one.uuid] = self._new_gpu(one.uuid)

    def _new_gpu(self, uuid: str) -> GovernedGpu:
        return GovernedGpu(
            holding=Holding(
                uuid=uuid,
                device=NvidiaDevice(uuid),
                directory=self._directory,
                machine=self._machine,
            ),
            thread=ThreadPoolExecutor(1, thread_name_prefix="kilter-gpu"),
        )


def _check_occupants(holding: Holding, peer: Peer) -> None:
    """In the GPU's thread. Raises `NotPermitted`."""
    pids = holding.device.compute_pids()
    reason = occupancy_refusal(pids, peer.uid, beside=peer.pid)
    if reason is not None:
        raise NotPermitted(f"kilter daemon: {reason}")


def _who(client: Client) -> dict[str, Any]:
    return {
        "uid": client.peer.uid,
        "user": client.user.name,
        "pid": client.peer.pid,
        "program": client.program,
    }


def _numbered(answer: Answer, number: int) -> Answer:
    return msgspec.structs.replace(answer, number=number)


async def _send(writer: asyncio.StreamWriter, answer: Answer) -> None:
    writer.write(encode(answer))
    async with asyncio.timeout(CLIENT_ANSWER_S):
        await writer.drain()


def _close(number: int) -> None:
    with suppress(OSError):
        os.close(number)
