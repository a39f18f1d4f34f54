"""The three labels. A reader never has to guess where a number comes from."""

from __future__ import annotations

import enum


class Label(enum.Enum):
    """Where a number comes from."""

    MEASURED = "measured"
    """It was read on the device that did the work."""
    REPLAYED = "replayed"
    """It was looked up in a named table of somebody's measurements."""
    SIMULATED = "simulated"
    """It was computed by a model."""
