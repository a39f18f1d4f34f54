"""The operator's policy against a plain reading of its rules, and the protocol's own limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilter.core.daemon_protocol import Ask, Grant, encode, read_request
from kilter.core.errors import FileError
from kilter.core.reasons import Reason
from kilter.core.setting import Setting
from kilter.lease.daemon.policy import AllowRule, DaemonPolicy, User, decide, parse

words = st.sampled_from(["alice", "bob", "ml", "*"])
rules = st.builds(
    AllowRule,
    users=st.lists(words | st.sampled_from([0, 1001]), max_size=2).map(tuple),
    groups=st.lists(st.sampled_from(["ml", 50]), max_size=1).map(tuple),
    gpus=st.sampled_from([("*",), ("GPU-a",), ("GPU-b", "GPU-a1"), ("",)]),
    power_limit_w=st.sampled_from([None, (300.0, 600.0)]),
)
users = st.sampled_from(
    [
        User(uid=0, name="root", groups=((0, "root"),)),
        User(uid=1001, name="alice", groups=((50, "ml"),)),
        User(uid=1002, name="bob"),
    ]
)


def allows(rule: AllowRule, user: User, uuid: str) -> bool:
    by_name = user.name in rule.users or user.uid in rule.users
    by_star = "*" in rule.users and user.uid != 0
    by_group = user.uid != 0 and any(g in rule.groups for pair in user.groups for g in pair)
    on_gpu = "*" in rule.gpus or any(g and uuid.startswith(g) for g in rule.gpus)
    return (by_name or by_star or by_group) and on_gpu


@given(st.lists(rules, max_size=4), users, st.sampled_from(["GPU-a1", "GPU-a2", "GPU-b"]))
def test_the_first_rule_that_names_both_decides(
    some: list[AllowRule], user: User, uuid: str
) -> None:
    decision = decide(DaemonPolicy(allow=tuple(some)), user, uuid)
    first = next((rule for rule in some if allows(rule, user, uuid)), None)
    if first is None:
        assert isinstance(decision, Reason)
        assert decision.code in ("user_not_allowed", "gpu_not_allowed")
    else:
        assert isinstance(decision, Grant)
        assert decision.power_limit_w == first.power_limit_w


any_float = st.none() | st.floats(allow_nan=True, allow_infinity=True)


@given(any_float, any_float, any_float)
def test_a_grant_lets_nothing_through_that_is_outside(
    sm: float | None, memory: float | None, limit: float | None
) -> None:
    grant = Grant(sm_clock_hz=(6e8, 2e9), power_limit_w=(300.0, 700.0))
    setting = Setting(sm_clock_hz=sm, memory_clock_hz=memory, power_limit_w=limit)
    inside = (
        (sm is None or 6e8 <= sm <= 2e9)
        and memory is None
        and (limit is None or 300.0 <= limit <= 700.0)
    )
    assert (grant.refusal(setting) is None) == inside


@given(st.binary(max_size=300))
def test_garbage_is_no_request(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_request(raw)


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists, max_leaves=20))
def test_other_json_is_no_request(value: object) -> None:
    import msgspec

    with pytest.raises(ValueError, match=r"."):
        read_request(msgspec.json.encode({"type": "Ask", "number": 1, "uuid": value}))


@pytest.mark.parametrize("hold_s", ["-1", "0", "1e999", "null", '"60"'])
def test_a_hold_without_an_end_is_refused(hold_s: str) -> None:
    line = b'{"type":"Ask","number":1,"uuid":"u","setting":{},"hold_s":%s}' % hold_s.encode()
    with pytest.raises(ValueError, match=r"."):
        read_request(line)


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(ValueError, match=r"."):
        read_request(b'{"type":' + b"[" * 4000)


def test_what_is_sent_is_what_is_read() -> None:
    ask = Ask(number=3, uuid="GPU-x", setting=Setting(sm_clock_hz=1e9), hold_s=30.0, why="train.py")
    assert read_request(encode(ask)) == ask


@pytest.mark.parametrize(
    "raw",
    [b"\xff", b"x", b"[[allow]]\nuser=['a']", b"[[allow]]\npower-limit-w=[600,300]",
     b"[[allow]]\npower-limit-w=[nan,300]", b"longest-hold-s = 0", b"[[allow]]\ngpus-at-once = 0"],
)  # fmt: skip
def test_a_malformed_policy_is_one_error_with_the_files_name(raw: bytes) -> None:
    with pytest.raises(FileError, match=r"policy\.toml"):
        parse(raw, where="policy.toml")
