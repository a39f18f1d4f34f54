"""What the program has set in the framework stands after an exception in the middle of ours."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kilter.memory.engine import CpuStandIn, Swapper, quiet
from kilter.memory.engine.modified import Modified
from kilter.memory.engine.watch import Watch
from kilter.memory.plan.problem import Link


class Alarm(Exception):
    pass


def settings() -> tuple[bool, bool]:
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")


def at_moment(number: int) -> Callable[[FrameType, str, Any], None]:
    """Raises at one of the moments at which python calls a signal handler: at the entry of a
    function written in Python, and after a call of one written in C."""
    left = [number]

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_return"):
            left[0] -= 1
            if left[0] == 0:
                raise Alarm

    return profile


@pytest.mark.parametrize("number", range(1, 16))
def test_an_alarm_leaves_no_setting_changed(number: int) -> None:
    def make() -> torch.Tensor:
        assert settings() == (False, False)
        return torch.ones(2)

    with torch.autocast("cpu", torch.bfloat16):
        before = settings()
        sys.setprofile(at_moment(number))
        try:
            quiet.uncast("cpu", lambda: quiet.ungraded(make))
            sys.setprofile(None)
        except Alarm:
            sys.setprofile(None)
        found = settings()
        torch.set_grad_enabled(True)
        assert found == before == (True, True)


def test_an_alarm_while_autograds_error_is_asked_for_arrives() -> None:
    """At any moment, until the error is raised."""
    tensor, moments, ended = torch.ones(4, 4), 0, None
    while not isinstance(ended, RuntimeError):
        moments += 1
        plant, planted = at_moment(moments), False

        def profile(frame: FrameType, event: str, argument: Any) -> None:
            nonlocal planted
            try:
                plant(frame, event, argument)  # noqa: B023
            except Alarm:
                planted = True
                raise

        sys.setprofile(profile)
        try:
            Modified(tensor, tensor._version + 1).raise_in_the_program(None, tensor)
        except (Alarm, RuntimeError) as error:
            sys.setprofile(None)
            ended = error
        assert isinstance(ended, Alarm) == planted
    assert moments > 10


def test_a_pass_that_an_alarm_ended_before_its_tensor_was_noted_is_like_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two passes end at the same event, one after and one before the tensor was noted."""
    link = Link(to_host_bytes_per_s=1e9, to_device_bytes_per_s=1e9, both_bytes_per_s=2e9)
    weight = torch.ones(64, 64, requires_grad=True)
    with Swapper(CpuStandIn(), budget_bytes=1 << 14, link=link, min_bytes=1024) as swapper:
        (weight * 2).sin()
        monkeypatch.setattr(Watch, "save", at_once)
        twice = weight * 2
        with pytest.raises(Alarm):
            twice.sin()
    assert swapper.report().passes == 2


def at_once(*arguments: Any) -> None:
    raise Alarm


def test_the_programs_modes_see_nothing_of_ours() -> None:
    def ours() -> torch.Tensor:
        return torch.ones(4, 4) @ torch.ones(4, 4)

    with FlopCounterMode(display=False) as counter:
        quiet.unseen(ours)
        assert counter.get_total_flops() == 0
        ours()
        assert counter.get_total_flops() == 128
