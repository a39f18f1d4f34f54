"""Looking for a proposal: rarely between proposals, at once while one is under way."""

import msgspec

from kilter.sharing.elastic.agreement import ITERATIONS_AHEAD, Agreement, Listener
from kilter.sharing.elastic.schedule import RatioSchedule


class _Store:
    """A key-value store that counts the looks at it."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.looks = 0

    def check(self, keys: list[str]) -> bool:
        self.looks += 1
        return all(key in self.kept for key in keys)

    def set(self, key: str, value: str) -> None:
        self.kept[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.kept[key]


def _listener() -> tuple[Listener, _Store, RatioSchedule]:
    store, schedule = _Store(), RatioSchedule()
    return Listener(store, 0, schedule), store, schedule  # type: ignore[arg-type]


def test_most_iterations_ask_the_store_nothing() -> None:
    listener, store, _ = _listener()
    listener.look_s = 3600.0
    for iteration in range(100):
        listener.before(iteration)
    assert store.looks == 1


def test_a_verdict_is_taken_at_the_next_iteration() -> None:
    listener, store, schedule = _listener()
    store.set("proposal/1", "[7, 3]")
    listener.before(5)
    assert store.kept["answer/1/0"] == b"5"
    listener.look_s = 3600.0  # of no consequence once the rank has answered
    listener.before(6)
    at = 5 + ITERATIONS_AHEAD
    store.kept["verdict/1"] = msgspec.json.encode(Agreement((7, 3), at))
    listener.before(7)
    assert schedule.at(at) == (7, 3)
    assert schedule.at(at - 1) is None
