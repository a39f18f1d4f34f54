"""What looks like a secret on a command line is masked wherever a run stores it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilter.core.secrets import MASK, masked

PLAIN = ("train.py", "--epochs", "3", "--tokenizer", "bert", "--token-dim=64", "--max-tokens", "9")


@pytest.mark.parametrize(
    "secret",
    [
        ("--api-key", "abc123"),
        ("--api_key=abc123",),
        ("--token=abc123",),
        ("--hf-token", "abc123"),
        ("--wandb.api_key", "abc123"),
        ("logger.api_key=abc123",),
        ("WANDB_API_KEY=abc123",),
        ("--db-password", "-abc123"),
        ("--aws-secret-access-key", "abc123/+"),
        ("--PASSWORD", "abc123"),
    ],
)
def test_the_value_of_a_secret_option_is_masked(secret: tuple[str, ...]) -> None:
    shown = masked((*PLAIN, *secret, "last"))
    assert "abc123" not in " ".join(shown)
    assert MASK in " ".join(shown)
    assert shown[: len(PLAIN)] == PLAIN
    assert shown[-1] == "last"
    assert len(shown) == len(PLAIN) + len(secret) + 1


@pytest.mark.parametrize(
    "secret",
    [
        "AKIAIOSFODNN7EXAMPLE",
        "hf_" + "a1B2" * 8,
        "sk-" + "proj-a1B2" * 4,
        "ghp_" + "a1B2" * 9,
        "eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSMeK",
    ],
)
def test_a_secret_is_known_by_its_form_wherever_it_stands(secret: str) -> None:
    shown = masked((*PLAIN, secret, f"--key={secret}", f"x:{secret}"))
    assert secret not in " ".join(shown)
    assert shown[: len(PLAIN)] == PLAIN


def test_a_password_in_a_url_is_masked() -> None:
    shown = masked(("--store", "postgres://ann:hunter2@db.example/runs"))
    assert shown == ("--store", f"postgres://{MASK}@db.example/runs")


def test_a_switch_with_a_secret_name_takes_no_option_with_it() -> None:
    assert masked(("--use-auth", "--lr", "0.1")) == ("--use-auth", "--lr", "0.1")


@given(st.lists(st.text(max_size=12), max_size=6))
def test_words_are_neither_added_nor_lost_and_masking_twice_is_masking_once(
    command: list[str],
) -> None:
    once = masked(command)
    assert len(once) == len(command)
    assert masked(once) == once
