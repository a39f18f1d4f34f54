"""How verbs print: one JSON object on standard output, and progress where a person looks."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from kilter.core.label import Label


def print_json(schema: str, label: Label | str, fields: Mapping[str, Any]) -> None:
    """What `--json` prints: the schema, where the figures come from, and the fields."""
    print(msgspec.json.encode({"schema": schema, "label": label, **fields}).decode())


def show_progress(text: str = "") -> None:
    """Replace the last line of standard error where it is a terminal; nothing: clear it."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
