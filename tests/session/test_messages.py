"""Messages between ranks: what is asked of the store, and how often."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from kilter.clocks.block_messages import BlockMessages, OrderNote  # noqa: E402
from kilter.core.messages import LocalMessages  # noqa: E402
from kilter.core.setting import Setting  # noqa: E402
from kilter.session import messages  # noqa: E402
from kilter.session.messages import StoreMessages  # noqa: E402


class AskedStore:
    """A store that counts the questions for each name."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self.asked: dict[str, int] = {}

    def compare_set(self, name: str, expected: str, desired: str) -> bytes:
        self.asked[name] = self.asked.get(name, 0) + 1
        return bytes(self._store.compare_set(name, expected, desired))

    def set(self, name: str, value: bytes) -> None:
        self._store.set(name, value)


class Clock:
    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


def answered(board: StoreMessages, name: str) -> bytes | None:
    """What one look finds, with an answer that is waited for however busy the machine is."""
    found = board.look(name)
    while name in board._unanswered:
        found = board.look(name)
    return found


def test_a_missing_message_is_looked_for_less_often_the_longer_it_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, store = Clock(), AskedStore()
    monkeypatch.setattr(messages, "time", clock)
    ranks = 64 * messages.LOOKS_PER_S  # 64 s between looks, at the most
    board = StoreMessages(lambda: store, world_size=ranks)
    asked = []
    for tick in range(10_000):
        clock.now_s = tick / 10
        assert answered(board, "order/1") is None
        asked.append(store.asked["order/1"])
    assert asked[3] >= 3, "the first moments: a message comes soon as a rule"
    assert asked[1_000] < 25, "in 100 s"
    assert asked[9_999] - asked[4_999] <= 500 / 64 + 1, "and never less often than that"
    store.set("order/1", b"here")
    clock.now_s += 64.0
    assert answered(board, "order/1") == b"here"
    board.close()


@pytest.mark.parametrize("message", [b"", b"\x00\xff?", b"note"])
def test_a_look_is_one_question_and_leaves_nothing_behind(
    message: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, store = Clock(), AskedStore()
    monkeypatch.setattr(messages, "time", clock)
    board = StoreMessages(lambda: store)
    assert answered(board, "a") is None
    assert not store._store.check(["a"])
    board.post("a", message)
    clock.now_s = 1.0
    assert answered(board, "a") == message
    assert store.asked["a"] == 2
    board.close()


def test_rank_0_asks_nobody_for_what_it_has_said_itself() -> None:
    class OnlyPosted(LocalMessages):
        def look(self, name: str) -> bytes | None:
            raise AssertionError(name)

    block = BlockMessages(OnlyPosted(), rank=0, world_size=1)
    note = OrderNote(setting=Setting(), roles={}, iterations=5)
    for index in range(3):
        block.post_order(note)
        assert block.order() == note
        block.post_begin(index)
        assert block.begin() == index
        block.next_block(leads=True)


def test_what_is_settled_first_holds_for_all() -> None:
    store = dist.HashStore()
    boards = [StoreMessages(lambda: store) for _ in range(2)]
    assert boards[1].settle("a", b"no") == b"no"
    assert boards[0].settle("a", b"yes") == b"no"
    assert answered(boards[0], "a") == b"no"
    for board in boards:
        board.close()


def test_workers_that_were_restarted_do_not_find_the_messages_of_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun's store outlives them."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        for count, before in (("0", None), ("1", None), ("1", b"posted in 1")):
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
            board = StoreMessages.find(2)
            assert board is not None
            assert answered(board, "order/0") == before
            board.post("order/0", b"posted in " + count.encode())
            board.close()
    finally:
        dist.destroy_process_group()
