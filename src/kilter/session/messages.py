"""Messages between ranks over the key-value store of `torch.distributed`."""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from kilter.core.messages import LocalMessages, MessagesGone, RankMessages
from kilter.observe import torch_internals
from kilter.observe.collective_counts import distributed

LOOKS_PER_S = 4096
"""All ranks together look at most so often a second for messages that do not come: one store
answers that in passing. Up to some hundred ranks each looks as often as it likes."""
BACK_OFF = 0.5
"""A message that has been missing for so long is looked for again after this share of that time, up
to the above: most come soon, and all ranks wait for the same one."""
LEAST_PAUSE_S = 0.05
"""Two looks are at least so far apart, where the ranks are too many for each to look as often as it
likes: a session asks more than once in a tick."""
_MISSING = "?"
"""It stands where there is no message."""
ANSWER_S = 0.5
"""How long an answer of the store is waited for: normally a fraction of a millisecond."""
LONGEST_ANSWER_S = 30.0
"""It is waited for so long where all ranks depend on the answer."""


class LookPace:
    """When a rank looks again for a message that was missing, by its name."""

    def __init__(self, world_size: int) -> None:
        self._most_s = world_size / LOOKS_PER_S
        self._missing: dict[str, tuple[float, float]] = {}
        """When each was found missing first and last."""

    def due(self, name: str, now_s: float) -> bool:
        first_s, last_s = self._missing.get(name, (now_s, -math.inf))
        again_s = max(LEAST_PAUSE_S, BACK_OFF * (now_s - first_s))
        return now_s - last_s >= min(self._most_s, again_s)

    def looked(self, name: str, now_s: float, *, found: bool) -> None:
        if found:
            self._missing.pop(name, None)
        else:
            self._missing[name] = self._missing.get(name, (now_s, now_s))[0], now_s


class StoreMessages:
    """Messages of several ranks in the key-value store at which their process group met.

    Calls are made by a thread of its own, over a second connection to the same server. The host of
    the store may stop to answer, for as long as it likes, and the client holds a lock while it
    talks: neither our other threads nor the job's own calls wait for that. `find` is None as long
    as there is no store.
    """

    def __init__(self, connect: Callable[[], Any], *, world_size: int = 1) -> None:
        """`connect` returns the store; it is called in that thread, and may raise
        `RuntimeError`."""
        self._connect = connect
        self._pace = LookPace(world_size)
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._unanswered: dict[str, _Call] = {}
        """It holds looks, by name."""
        self._gone: str | None = None
        threading.Thread(target=self._talk, name="kilter-messages", daemon=True).start()

    @classmethod
    def find(cls, world_size: int) -> StoreMessages | None:
        """The store of this process's group, once there is one."""
        dist = distributed()
        if dist is None:
            return None
        store = torch_internals.default_store()
        # `store` lives as long as these messages do: it may be the one that serves, and be dropped
        # with its process group while other ranks still look. Workers that torchrun has restarted
        # find the messages of those before them in its store.
        name = f"kilter/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        return cls(lambda: dist.PrefixStore(name, _second_connection(store)), world_size=world_size)

    def post(self, name: str, message: bytes) -> None:
        self._ask(lambda store: store.set(name, message))

    def look(self, name: str) -> bytes | None:
        now_s = time.monotonic()
        if not self._pace.due(name, now_s):
            return None
        call = self._unanswered.pop(name, None)
        call = self._ask(lambda store: _note(store, name), call)
        if not call.done.is_set():
            self._unanswered[name] = call
        answer: bytes | None = call.answer
        self._pace.looked(name, now_s, found=answer is not None)
        return answer

    def settle(self, name: str, proposal: bytes) -> bytes:
        call = self._ask(
            lambda store: store.compare_set(name, "", proposal.decode()), wait_s=LONGEST_ANSWER_S
        )
        if not call.done.is_set():
            raise MessagesGone("the key-value store of the job does not answer")
        return bytes(call.answer)

    def drop(self, name: str) -> None:
        """Not waited for: nobody reads it any more."""
        self._ask(lambda store: store.delete_key(name), wait_s=0.0)

    def close(self) -> None:
        """Let the thread end once it has its answers; not waited for."""
        self._calls.put(None)

    def _ask(
        self,
        act: Callable[[Any], Any],
        call: _Call | None = None,
        *,
        wait_s: float = ANSWER_S,
    ) -> _Call:
        """Wait a moment for the answer to this call, or to an earlier one. Later is fine."""
        if call is None:
            call = _Call(act)
            self._calls.put(call)
        if self._gone is None:
            call.done.wait(wait_s)
        if self._gone is not None:
            raise MessagesGone(f"the key-value store of the job is gone ({self._gone})")
        return call

    def _talk(self) -> None:
        call: _Call | None = None
        try:
            store = self._connect()
            while (call := self._calls.get()) is not None:
                call.answer = call.act(store)
                call.done.set()
        except RuntimeError as error:  # torch's DistError, and what its other stores raise
            self._gone = str(error).partition("\n")[0]
            if call is not None:
                call.done.set()


class _Call:
    """One call on its way through the thread."""

    def __init__(self, act: Callable[[Any], Any]) -> None:
        self.act = act
        self.answer: Any = None
        self.done = threading.Event()


def _note(store: Any, name: str) -> bytes | None:
    """In one round trip, where `check` and `get` take three: a key that is missing is answered with
    the value that was expected, and nothing is set unless the key has just that value."""
    found = bytes(store.compare_set(name, _MISSING, _MISSING))
    return None if found == _MISSING.encode() else found


def _second_connection(store: Any) -> Any:
    """The same TCP store over a connection of our own; any other kind of store as it is."""
    import torch.distributed as dist

    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return store
    return dist.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)


class RunMessages:
    """The messages between the ranks of a run, once they can reach each other."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._found: RankMessages | None = None

    def find(self) -> RankMessages | None:
        """Of a process that is alone: its own; of several: in the store of their process group,
        once there is one."""
        if self._found is None:
            alone = self._world_size == 1
            self._found = LocalMessages() if alone else StoreMessages.find(self._world_size)
        return self._found

    def close(self) -> None:
        if self._found is not None:
            self._found.close()
