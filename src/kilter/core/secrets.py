"""Command lines without their secrets: what a run stores is read by more people than started it."""

from __future__ import annotations

import re
from collections.abc import Iterable

MASK = "***"

_NAME = re.compile(
    r"(?:^|[-_.])(?:api[-_]?key|access[-_]?key|private[-_]?key|secret[-_]?key|secret|token|"
    r"password|passwd|passphrase|credentials?|auth)$",
    re.IGNORECASE,
)
"""It matches options and variables whose value is secret, by the end of their name: `--hf-token` is
one, `--tokenizer` and `--token-dim` are not."""

_VALUE = re.compile(
    r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"  # AWS
    r"|\bhf_[A-Za-z0-9]{16,}"  # Hugging Face
    r"|\bsk-[A-Za-z0-9_-]{16,}"  # OpenAI, Anthropic and others
    r"|\bgh[opsur]_[A-Za-z0-9]{20,}|\bgithub_pat_[A-Za-z0-9_]{20,}"
    r"|\bglpat-[A-Za-z0-9_-]{16,}"
    r"|\bxox[abeprs]-[A-Za-z0-9-]{10,}"  # Slack
    r"|\bAIza[0-9A-Za-z_-]{30,}"  # Google
    r"|\beyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"  # a JSON web token
    r"|(?<=://)[^/@\s]*:[^/@\s]+(?=@)"  # user:password of a URL
    r"|(?<=Bearer )\S+"
)
"""It matches texts that are secret wherever they stand."""


def masked(command: Iterable[str]) -> tuple[str, ...]:
    """The words of a command line; in place of what looks like a secret, `MASK`."""
    words: list[str] = []
    secret_follows = False
    for word in command:
        name, equals, _ = word.partition("=")
        if secret_follows and not word.startswith("--"):
            words.append(MASK)
            secret_follows = False
            continue
        is_secret = _NAME.search(name) is not None
        secret_follows = is_secret and word.startswith("-") and not equals
        words.append(f"{name}={MASK}" if is_secret and equals else _VALUE.sub(MASK, word))
    return tuple(words)
