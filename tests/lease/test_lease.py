"""The lease on a card in memory: every effect is a step, and each step fails or is the last one.

A step is a vendor call, a file operation of the journal, or a word to the watcher. A dry run counts
them; then the same job is run again for each of them, with an error or a death before or after it.
Real processes and a real watcher: `tests/contract/test_lease_kill.py`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kilter.core.own_file
import kilter.lease.journal
import kilter.lease.lease
from kilter.core.errors import (
    DeviceError,
    DeviceHung,
    DeviceLost,
    FileError,
    Held,
    NotObeyed,
    NotPermitted,
    NotSupported,
)
from kilter.core.label import Label
from kilter.core.own_file import OwnFile
from kilter.core.setting import DeviceInfo, Sample, Setting, Supported
from kilter.lease.journal import (
    JournalPlace,
    RestoreOutcome,
    journals,
    restore_all,
    state_directory,
)
from kilter.lease.lease import Lease
from kilter.lease.machine import GpuLock

FOUND = Setting(power_limit_w=600.0)
LOW = Setting(sm_clock_hz=1.2e9, power_limit_w=400.0)
LOWER = Setting(sm_clock_hz=0.9e9)
TOP_HZ = 1.98e9


class Death(BaseException):
    """The process is no more. Nothing of it may run after this: no `finally`, no `except`."""


@dataclass
class Steps:
    """Counts effects; at one of them something happens."""

    at: int = -1
    happens: Callable[[str], BaseException] = lambda name: DeviceError(name)
    after: bool = False
    """The effect takes place first."""
    forever: bool = False
    only: frozenset[str] = frozenset()
    """Strikes at no other kind of step; empty: at all."""
    names: list[str] = field(default_factory=list)
    dead: bool = False

    def take(self, name: str, act: Callable[[], Any]) -> Any:
        if self.dead:
            raise Death(name)
        number = len(self.names)
        self.names.append(name)
        struck = number == self.at or (self.forever and number >= self.at >= 0)
        struck = struck and (not self.only or name in self.only)
        if struck and not self.after:
            self._strike(name)
        result = act()
        if struck:
            self._strike(name)
        return result

    def _strike(self, name: str) -> None:
        error = self.happens(name)
        self.dead = isinstance(error, Death)
        raise error


@dataclass
class Card:
    """What outlives processes. Its load is full, so it runs at its cap."""

    sm_cap_hz: float | None = None
    memory_cap_hz: float | None = None
    limit_w: float = 600.0
    obeys: bool = True
    busy: bool = True
    sets: int = 0

    @property
    def setting(self) -> Setting:
        return Setting(
            sm_clock_hz=self.sm_cap_hz,
            memory_clock_hz=self.memory_cap_hz,
            power_limit_w=self.limit_w,
        )

    @property
    def sm_clock_hz(self) -> float:
        if not self.busy:
            return 0.345e9
        return self.sm_cap_hz if self.sm_cap_hz and self.obeys else TOP_HZ


class Handle:
    """A device object as NVML allows it: locked clocks cannot be asked for, only remembered. What
    it has never set it leaves alone."""

    def __init__(
        self,
        card: Card,
        steps: Steps | None = None,
        *,
        persistent: bool = True,
        refusal: str | None = None,
    ) -> None:
        self.card = card
        self.steps = steps or Steps()
        self.persistent = persistent
        self.refusal = refusal
        self.known: dict[str, float | None] = {}
        self.lies = False
        self.t_s = 0.0

    def info(self) -> DeviceInfo:
        return DeviceInfo(
            name="card in memory",
            uuid="GPU-memory",
            backend="memory",
            label=Label.SIMULATED,
            can_set=self.refusal is None,
            refusal=self.refusal,
            persistent=self.persistent,
            switch_latency_s=0.5,
        )

    def sample(self, *, energy: bool = False) -> Sample:
        return self.steps.take("sample", self._sample)

    def _sample(self) -> Sample:
        self.t_s += 0.2
        return Sample(
            t_s=self.t_s,
            sm_clock_hz=self.card.sm_clock_hz,
            sm_utilisation=float(self.card.busy),
        )

    def supported(self) -> Supported:
        return Supported()

    def settings(self) -> Setting:
        def act() -> Setting:
            return Setting(
                sm_clock_hz=self.known.get("sm"),
                memory_clock_hz=self.known.get("memory"),
                power_limit_w=self.card.limit_w,
            )

        return self.steps.take("settings", act)

    def set(self, setting: Setting) -> None:
        self.card.sets += 1

        def sm() -> None:
            if self.known.get("sm") != setting.sm_clock_hz:
                self.card.sm_cap_hz = self.known["sm"] = setting.sm_clock_hz

        def memory() -> None:
            if self.known.get("memory") != setting.memory_clock_hz:
                self.card.memory_cap_hz = self.known["memory"] = setting.memory_clock_hz

        def limit() -> None:
            if setting.power_limit_w is not None and not self.lies:
                self.card.limit_w = setting.power_limit_w

        self.steps.take("set memory clock", memory)
        self.steps.take("set SM clock", sm)
        self.steps.take("set limit", limit)

    def reset(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


class Watch:
    """In the place of the watcher process: says what a test wants it to say."""

    connected = True

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.number = 0
        self.over: list[int] = []
        self.gone = False

    def tell(self, deadline_s: float) -> int | None:
        def act() -> int | None:
            self.number += 1
            return None if self.gone else self.number

        return self.steps.take("tell watcher", act)

    def passed(self) -> list[int]:
        over, self.over = self.over, []
        return over

    def close(self) -> None:
        pass


@dataclass
class World:
    """A card, a directory, the steps of the process that runs now, and its watchers."""

    directory: Path
    steps: Steps = field(default_factory=Steps)
    card: Card = field(default_factory=Card)
    watches: list[Watch] = field(default_factory=list)

    def lease(self, **handle: Any) -> Lease:
        return Lease(Handle(self.card, self.steps, **handle), directory=self.directory)

    def restore(self) -> list[RestoreOutcome]:
        return list(restore_all(self.directory, open_device=lambda _: Handle(self.card)))

    @property
    def files(self) -> set[str]:
        """What is there, by kind. A part is what a death may leave; the next one overwrites it."""
        return {path.suffix for path in self.directory.iterdir()} - {".part"}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    world = World(tmp_path)
    _route(world, monkeypatch)
    return world


FILE_EFFECTS = ("open", "write", "fsync", "replace")


def _route(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """File operations of the journal, and the watcher, become steps."""
    real = {name: getattr(os, name) for name in FILE_EFFECTS} | {"fsync": lambda _: None}

    class Os:
        def __getattr__(self, name: str) -> Any:
            if name not in real:
                return getattr(os, name)
            return lambda *args: world.steps.take(name, lambda: real[name](*args))

    def start(*_: Any) -> Watch:
        def act() -> Watch:
            world.watches.append(Watch(world.steps))
            return world.watches[-1]

        return world.steps.take("start watcher", act)

    unlink = Path.unlink
    monkeypatch.setattr(kilter.lease.journal, "os", Os())
    monkeypatch.setattr(kilter.core.own_file, "os", Os())
    monkeypatch.setattr(kilter.lease.lease._Watcher, "start", start)
    monkeypatch.setattr(
        Path,
        "unlink",
        lambda path, missing_ok=False: world.steps.take(
            "unlink", lambda: unlink(path, missing_ok=missing_ok)
        ),
    )


def job(world: World, settings: tuple[Setting, ...] = (LOW, LOWER, FOUND, LOW)) -> None:
    """Some life under a lease; ends in good order unless a step strikes."""
    with world.lease() as lease:
        for setting in settings:
            lease.set(setting)
            for _ in range(4):
                lease.verify(lease._device.sample())
            lease.renew()


@contextmanager
def process(world: World, steps: Steps) -> Iterator[None]:
    """What runs inside may die; then the kernel closes its files."""
    before = open_files()
    world.steps = steps
    try:
        with suppress(Death):
            yield
    finally:
        for handle in open_files() - before:
            os.close(handle)
        world.steps = Steps()


def open_files() -> set[int]:
    """Without the one that is open only to look."""
    handles = {int(name) for name in os.listdir("/proc/self/fd")}
    return {handle for handle in handles if os.path.exists(f"/proc/self/fd/{handle}")}


def count(world: World) -> list[str]:
    with process(world, steps := Steps()):
        job(world)
    return steps.names


def test_the_job_of_the_fault_tests_touches_everything(world: World) -> None:
    names = count(world)
    assert {"open", "write", "fsync", "replace", "unlink", "start watcher", "tell watcher"} < set(
        names
    )
    assert names.index("start watcher") < names.index("set SM clock")
    assert world.card.setting == FOUND
    assert world.files == {".lock"}


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_death_at_any_step_is_healed_by_the_next_start(world: World, after: bool) -> None:
    for number, name in enumerate(count(world)):
        with process(world, Steps(at=number, happens=Death, after=after)):
            job(world)
        world.restore()
        assert (world.card.setting, world.files) == (FOUND, {".lock"}), (number, name)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_death_at_any_step_is_healed_by_the_next_job(world: World, after: bool) -> None:
    for number, name in enumerate(count(world)):
        with process(world, Steps(at=number, happens=Death, after=after)):
            job(world)
        with world.lease() as lease:
            assert (lease.found, world.card.setting) == (FOUND, FOUND), (number, name)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_death_at_any_step_of_the_healing_is_healed(world: World, after: bool) -> None:
    def leave_something() -> None:
        with process(world, Steps(at=len(first) - 1, happens=Death)):
            job(world)

    first = count(world)
    leave_something()
    with process(world, steps := Steps()):
        world_restore_with(world)
    for number, name in enumerate(steps.names):
        leave_something()
        with process(world, Steps(at=number, happens=Death, after=after)):
            world_restore_with(world)
        world.restore()
        assert (world.card.setting, world.files) == (FOUND, {".lock"}), (number, name)


def world_restore_with(world: World) -> None:
    """`restore_all` whose device calls are steps, too."""
    list(restore_all(world.directory, open_device=lambda _: Handle(world.card, world.steps)))


def fail(name: str) -> BaseException:
    if name in (*FILE_EFFECTS, "unlink"):
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return DeviceError(f"{name} was refused")


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_an_error_at_any_step_ends_with_what_was_found(world: World, after: bool) -> None:
    """The job's own restore, or else the journal, which the watcher reads next."""
    for number, name in enumerate(count(world)):
        steps = Steps(at=number, happens=fail, after=after)
        with process(world, steps), suppress(DeviceError, FileError):
            job(world)
        if (world.card.setting, world.files) != (FOUND, {".lock"}):
            assert ".json" in world.files, (number, name)
            world.restore()
        assert (world.card.setting, world.files) == (FOUND, {".lock"}), (number, name)


VENDOR_CALLS = frozenset({"sample", "settings", "set memory clock", "set SM clock", "set limit"})


def test_a_device_lost_at_any_step_keeps_the_journal_until_it_is_back(world: World) -> None:
    for number, name in enumerate(count(world)):
        steps = Steps(at=number, happens=DeviceLost, forever=True, only=VENDOR_CALLS)
        with process(world, steps), suppress(DeviceLost):
            job(world)
        if world.card.setting != FOUND:
            assert ".json" in world.files, (number, name)
        world.restore()
        assert (world.card.setting, world.files) == (FOUND, {".lock"}), (number, name)


@given(
    settings=st.lists(
        st.builds(
            Setting,
            sm_clock_hz=st.sampled_from([None, 0.6e9, 1.2e9, 1.8e9]),
            power_limit_w=st.sampled_from([None, 300.0, 600.0, 650.0]),
        ),
        max_size=5,
    ),
    strike=st.integers(0, 120),
    after=st.booleans(),
)
def test_any_job_that_dies_anywhere_leaves_what_it_found(
    tmp_path_factory: pytest.TempPathFactory, settings: list[Setting], strike: int, after: bool
) -> None:
    world = World(tmp_path_factory.mktemp("lease"))
    with pytest.MonkeyPatch.context() as monkeypatch:
        _route(world, monkeypatch)
        with process(world, Steps(at=strike, happens=Death, after=after)):
            job(world, tuple(settings))
        world.restore()
    assert (world.card.setting, world.files - {".lock"}) == (FOUND, set())


def test_restoring_is_final_and_may_be_repeated(world: World) -> None:
    with world.lease() as lease:
        lease.set(LOW)
        assert world.card.setting == LOW
        first = lease.restore()
        assert first.restored
        assert world.card.setting == FOUND
        world.card.limit_w = 555.0  # whoever comes after us
        assert lease.restore() is first
        with pytest.raises(Held, match="ended"):
            lease.set(LOW)
    assert world.card.limit_w == 555.0


def test_open_knobs_stay_as_they_were_found(world: World) -> None:
    with world.lease() as lease:
        lease.set(Setting(sm_clock_hz=1.2e9))
        assert world.card.setting == replace(FOUND, sm_clock_hz=1.2e9)
        lease.set(Setting())
        assert world.card.setting == FOUND


def test_what_is_found_is_what_was_there_at_the_first_set(world: World) -> None:
    with world.lease() as lease:
        world.card.limit_w = 500.0
        lease.set(LOW)
        assert lease.found.power_limit_w == 500.0
    assert world.card.limit_w == 500.0


def test_nothing_is_written_or_set_without_a_need(world: World) -> None:
    with world.lease() as lease:
        lease.set(FOUND)
        lease.renew()
        assert world.files == {".lock"}
    assert world.card.sets == 0
    assert lease.outcome is not None
    assert lease.outcome.reason == "nothing was set"


def test_a_device_that_may_not_be_set_is_refused_before_anything_is_written(world: World) -> None:
    with (
        pytest.raises(NotPermitted, match="ask the administrator"),
        world.lease(refusal="ask the administrator"),
    ):
        pass
    assert world.files == set()


def test_settings_that_vanish_with_the_process_need_no_files(world: World) -> None:
    with world.lease(persistent=False) as lease:
        lease.set(LOW)
        assert world.card.setting == LOW
        assert lease.renew()
    assert lease.outcome is not None
    assert lease.outcome.restored
    assert world.card.setting == FOUND
    assert world.files == set()
    assert world.watches == []


def test_a_forked_child_neither_sets_nor_restores_nor_waits(world: World) -> None:
    """The fork as seen by the child, where another thread's lock is held for ever."""
    with world.lease() as lease:
        lease.set(LOW)
        lock = lease._lock
        assert lock is not None
        lease._lock = GpuLock(OwnFile(os.dup(lock.numbers[0])))
        with lease._turn:
            lease._forget()
        pid, lease._pid = lease._pid, -1
        with pytest.raises(Held, match="another process"):
            lease.set(LOWER)
        assert world.card.setting == LOW
        lease._pid, lease._lock = pid, lock
    assert world.card.setting == FOUND


def test_a_second_lease_names_the_process_that_has_the_first(world: World) -> None:
    with world.lease() as lease:
        lease.set(LOW)
        with pytest.raises(Held, match=f"process {os.getpid()} controls"), world.lease():
            pass
        assert world.card.setting == LOW
    with world.lease():
        pass


def test_a_dead_watcher_is_replaced_before_the_next_set_and_fenced(world: World) -> None:
    place = JournalPlace(world.directory, "GPU-memory")
    with world.lease() as lease:
        lease.set(LOW)
        world.watches[0].gone = True
        first = place.read()
        lease.set(LOWER)
        second = place.read()
        assert first is not None
        assert second is not None
        assert first.nonce != second.nonce
        assert len(world.watches) == 2
        world.watches[1].gone = True
        assert lease.renew()
        assert len(world.watches) == 3


def test_a_watcher_that_cannot_start_means_that_nothing_is_set(world: World) -> None:
    number, before = count(world).index("start watcher"), world.card.sets
    with (
        process(world, Steps(at=number, happens=fail)),
        pytest.raises(DeviceError, match="start watcher"),
    ):
        job(world)
    assert world.card.sets == before
    assert world.files == {".lock"}


def test_a_deadline_that_has_passed_is_told_and_the_next_set_takes(world: World) -> None:
    """The device object believes that its clock is still locked; the card was released."""
    with world.lease() as lease:
        lease.set(LOW)
        world.card.sm_cap_hz, world.card.limit_w = None, 600.0  # the watcher, in its process
        world.watches[0].over.append(1)
        assert not lease.renew()
        assert lease.setting == FOUND
        lease.set(LOW)
        assert world.card.setting == LOW


def test_a_set_after_a_deadline_takes_without_a_renewal_before(world: World) -> None:
    with world.lease() as lease:
        lease.set(LOW)
        world.card.sm_cap_hz, world.card.limit_w = None, 600.0
        world.watches[0].over.append(1)
        lease.set(LOW)
        assert world.card.setting == LOW


def test_a_deadline_that_passed_unnoticed_is_not_taken_for_somebody_else(world: World) -> None:
    with world.lease() as lease:
        lease.set(LOW)
        look(lease)
        world.card.sm_cap_hz, world.card.limit_w = None, 600.0  # the watcher, in its process
        world.watches[0].over.append(1)
    assert lease.outcome is not None
    assert lease.outcome.left == ()
    assert world.card.setting == FOUND


def test_a_limit_set_by_somebody_after_a_deadline_is_not_overwritten(world: World) -> None:
    with world.lease() as lease:
        lease.set(LOW)
        world.card.sm_cap_hz, world.card.limit_w = None, 500.0
        world.watches[0].over.append(1)
        with pytest.raises(Held, match="500 W"):
            lease.set(LOW)
    assert world.card.setting == replace(FOUND, power_limit_w=500.0)


def test_a_set_that_takes_longer_than_its_deadline_is_undone(world: World) -> None:
    with world.lease() as lease:
        lease.set(LOW)
        watch = world.watches[0]
        watch.passed = lambda: [2] if watch.number == 2 else []  # type: ignore[method-assign]
        with pytest.raises(DeviceHung):
            lease.set(LOWER)
    assert world.card.setting == FOUND


def test_a_set_that_meets_the_restore_of_an_earlier_deadline_is_done_again(world: World) -> None:
    with world.lease() as lease:
        lease.set(LOW)
        watch = world.watches[0]

        def passed() -> list[int]:
            if watch.number != 2 or world.card.sm_cap_hz != LOWER.sm_clock_hz:
                return []
            world.card.sm_cap_hz, world.card.limit_w = None, 600.0  # just after our set
            return [1]

        watch.passed = passed  # type: ignore[method-assign]
        lease.set(LOWER)
        watch.passed = list  # type: ignore[method-assign]
        assert world.card.setting == replace(FOUND, sm_clock_hz=LOWER.sm_clock_hz)


def test_a_limit_that_is_reported_but_not_taken_is_noticed(world: World) -> None:
    with world.lease() as lease:
        lease._device.lies = True  # type: ignore[attr-defined]
        with pytest.raises(NotObeyed, match="400 W"):
            lease.set(LOW)
    assert world.card.setting == FOUND


def look(lease: Lease, times: int = 5) -> None:
    for _ in range(times):
        lease.verify(lease._device.sample())


def test_a_clock_that_stays_above_its_cap_is_not_obeyed(world: World) -> None:
    world.card.obeys = False
    with world.lease() as lease:
        lease.set(LOW)
        look(lease, 2)  # it may need this long
        with pytest.raises(NotObeyed, match="1980 MHz"):
            look(lease)
    assert world.card.setting == FOUND


def test_a_clock_below_its_cap_is_fine_and_an_idle_one_proves_nothing(world: World) -> None:
    with world.lease() as lease:
        lease.set(LOW)
        world.card.busy, world.card.obeys = False, False
        look(lease)
        world.card.busy = True
        with pytest.raises(NotObeyed):
            look(lease)


def test_a_clock_that_somebody_else_has_released_is_left_to_them(world: World) -> None:
    with world.lease() as lease:
        lease.set(LOW)
        look(lease)
        world.card.sm_cap_hz = 1.5e9
        with pytest.raises(Held, match="its clocks"):
            look(lease)
    assert world.card.setting == replace(FOUND, sm_clock_hz=1.5e9)
    assert lease.outcome is not None
    assert lease.outcome.left == ("sm_clock_hz",)


def test_a_limit_that_somebody_else_has_set_is_not_overwritten(world: World) -> None:
    with world.lease() as lease:
        lease.set(LOW)
        world.card.limit_w = 500.0
        with pytest.raises(Held, match="500 W"):
            lease.set(LOWER)
    assert world.card.setting == replace(FOUND, power_limit_w=500.0)
    assert lease.outcome is not None
    assert lease.outcome.left == ("power_limit_w",)


def test_a_dead_job_does_not_overwrite_a_newer_clock_either(world: World) -> None:
    with process(world, Steps()), world.lease() as lease:
        lease.set(Setting(sm_clock_hz=1.2e9))
        look(lease)
        world.steps.dead = True
    world.card.sm_cap_hz = 1.5e9
    [outcome] = world.restore()
    assert outcome.left == ("sm_clock_hz",)
    assert world.card.setting == replace(FOUND, sm_clock_hz=1.5e9)


def test_a_clock_that_the_site_has_locked_stays_locked(world: World) -> None:
    """It cannot be read, so it is not in `found`; it is kept by never being touched."""
    world.card.memory_cap_hz = 2.2e9
    with world.lease() as lease:
        lease.set(LOW)
    assert world.card.setting == replace(FOUND, memory_clock_hz=2.2e9)
    with process(world, Steps()), world.lease() as lease:
        lease.set(LOW)
        world.steps.dead = True
    world.restore()
    assert world.card.setting == replace(FOUND, memory_clock_hz=2.2e9)


def test_one_knob_is_put_back_and_the_other_is_left_to_somebody_else(world: World) -> None:
    with process(world, Steps()), world.lease() as lease:
        lease.set(LOW)
        look(lease)
        world.steps.dead = True
    world.card.sm_cap_hz = 1.5e9
    world.restore()
    assert world.card.setting == replace(FOUND, sm_clock_hz=1.5e9)


def test_a_journal_of_another_boot_is_thrown_away(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with process(world, Steps()), world.lease() as lease:
        lease.set(LOW)
        world.steps.dead = True
    world.card.sm_cap_hz, world.card.limit_w = None, 700.0  # what a reboot does
    sets = world.card.sets
    monkeypatch.setattr(kilter.lease.journal, "boot_id", lambda: "another")
    with world.lease() as lease:
        assert lease.recovered is not None
        assert lease.recovered.state == "discarded"
        assert lease.found == Setting(power_limit_w=700.0)
    assert world.card.sets == sets


def test_a_damaged_journal_stops_the_lease_and_not_the_other_gpus(world: World) -> None:
    with process(world, Steps()), world.lease() as lease:
        lease.set(LOW)
        world.steps.dead = True
    (world.directory / "GPU-first.json").write_text('{"schema": "kilter.lease/1", "uu')
    first, second = world.restore()
    assert (first.state, first.uuid) == ("failed", "GPU-first")
    assert "nvidia-smi" in first.reason
    assert second.restored
    assert world.card.setting == FOUND


def test_journals_say_who_lives(world: World) -> None:
    with world.lease() as lease:
        lease.set(LOW)
        [entry] = journals(world.directory)
        assert entry.alive
        assert entry.journal is not None
        assert (entry.journal.found, entry.journal.last) == (FOUND, LOW)
        [outcome] = world.restore()
        assert (outcome.state, outcome.pid) == ("held", os.getpid())
        assert world.card.setting == LOW
    assert list(journals(world.directory)) == []


def test_a_set_that_is_refused_for_its_value_puts_back_what_was_found(world: World) -> None:
    with world.lease() as lease:
        lease.set(LOW)
        handle = lease._device
        real, handle.set = handle.set, lambda _: (_ for _ in ()).throw(NotSupported("no"))  # type: ignore[method-assign]
        with pytest.raises(NotSupported):
            lease.set(LOWER)
        assert lease.outcome is not None
        assert not lease.outcome.restored
        handle.set = real  # type: ignore[method-assign]
    world.restore()
    assert world.card.setting == FOUND


class TestStateDirectory:
    def test_the_variable_wins(self, tmp_path: Path) -> None:
        chosen = tmp_path / "a" / "b"
        assert state_directory({"KILTER_STATE_DIR": str(chosen)}) == chosen
        assert chosen.stat().st_mode & 0o777 == 0o700

    def test_a_user_has_one_of_his_own(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() or 0)
        monkeypatch.setattr(kilter.lease.journal.os, "access", lambda path, _: path != "/run")
        assert state_directory({"XDG_RUNTIME_DIR": str(tmp_path)}) == tmp_path / "kilter"
        monkeypatch.setattr(kilter.lease.journal.tempfile, "gettempdir", lambda: str(tmp_path))
        assert state_directory({}) == tmp_path / f"kilter-{os.geteuid()}"

    def test_a_directory_that_others_may_write_to_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(kilter.lease.journal.os, "access", lambda path, _: path != "/run")
        (tmp_path / "kilter").mkdir()
        (tmp_path / "kilter").chmod(0o777)
        with pytest.raises(FileError, match="open to others"):
            state_directory({"XDG_RUNTIME_DIR": str(tmp_path)})

    @pytest.mark.skipif(os.geteuid() != 0, reason="root alone has to look above")
    def test_root_uses_none_that_another_user_could_replace(self, tmp_path: Path) -> None:
        theirs = tmp_path / "theirs"
        (theirs / "state").mkdir(parents=True, mode=0o700)
        os.chown(theirs, 61003, 61003)
        with pytest.raises(FileError, match="another user"):
            state_directory({"KILTER_STATE_DIR": str(theirs / "state")})
        link = tmp_path / "link"
        link.symlink_to(theirs / "state")
        with pytest.raises(FileError, match="another user"):
            state_directory({"KILTER_STATE_DIR": str(link)})

    def test_one_that_cannot_be_made_names_the_variable(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(FileError, match="KILTER_STATE_DIR"):
            state_directory({"KILTER_STATE_DIR": str(tmp_path / "file" / "x")})
