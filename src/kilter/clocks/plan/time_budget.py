"""How much time a watch over waits may lose: a share of the time that passes. Pure."""

from __future__ import annotations


class TimeBudget:
    """Seconds that may be lost; they are paid in advance or when they are known. At most `most_s`
    are saved up, so that a long quiet time does not pay for many losses in a row."""

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._filled_s: float | None = None
        self.left_s = 0.0

    def fill(self, t_s: float, share: float) -> None:
        """Since the last call, this share of the time has been earned."""
        before_s = t_s if self._filled_s is None else self._filled_s
        self._filled_s = t_s
        self.left_s = min(self._most_s, self.left_s + share * (t_s - before_s))

    def pay(self, seconds: float) -> None:
        self.left_s -= seconds

    def grant(self, seconds: float) -> None:
        """Somebody else keeps the account: so much is left."""
        self.left_s = seconds
