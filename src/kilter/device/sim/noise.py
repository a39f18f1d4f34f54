"""What keeps equal iterations from taking equal times: white noise, drift, and outliers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Relative to the true time of an iteration. Zero switches a part off.

    An iteration takes `true * (1 + white + drift + outlier)`: white noise, a stationary AR(1)
    drift, and now and then an outlier, which only ever makes it slower (exponential).
    """

    white: float = 0.0
    """It is a standard deviation."""
    drift: float = 0.0
    """It is the standard deviation of a stationary AR(1) process."""
    memory: float = 0.9
    """That process correlates so much from one iteration to the next."""
    outlier_probability: float = 0.0
    outlier_mean: float = 0.1
    power: float = 0.0
    """The power of an iteration has this standard deviation."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.memory < 1.0:
            raise ValueError(f"memory={self.memory} must be in [0, 1)")
        if not 0.0 <= self.outlier_probability <= 1.0:
            raise ValueError(f"outlier_probability={self.outlier_probability} must be in [0, 1]")
        if min(self.white, self.drift, self.outlier_mean, self.power) < 0:
            raise ValueError("standard deviations must not be negative")


QUIET = Noise()
"""There is no noise at all."""


class NoiseSource:
    """A seeded stream of factors. Draws ahead in blocks, since one draw at a time is slow."""

    _BLOCK = 256
    _LEAST = 0.5
    """No iteration takes less than half of its true time, however large the noise."""

    def __init__(self, noise: Noise, rng: np.random.Generator) -> None:
        self._noise = noise
        self._rng = rng
        self._drift = rng.normal(0.0, noise.drift)
        self._factors: list[tuple[float, float]] = []

    def draw(self) -> tuple[float, float]:
        """(factor on time, factor on power) of the next iteration."""
        if not self._factors:
            self._factors = self._block()
        return self._factors.pop()

    def _block(self) -> list[tuple[float, float]]:
        noise, rng, n = self._noise, self._rng, self._BLOCK
        if noise == replace(QUIET, memory=noise.memory, outlier_mean=noise.outlier_mean):
            return [(1.0, 1.0)] * n
        steps = rng.normal(0.0, noise.drift * math.sqrt(1 - noise.memory**2), n)
        drift = np.empty(n)
        for i, step in enumerate(steps):
            self._drift = noise.memory * self._drift + step
            drift[i] = self._drift
        hit = rng.random(n) < noise.outlier_probability
        outlier = np.where(hit, rng.exponential(noise.outlier_mean, n), 0.0)
        time = np.maximum(self._LEAST, 1 + rng.normal(0.0, noise.white, n) + drift + outlier)
        power = np.maximum(self._LEAST, 1 + rng.normal(0.0, noise.power, n))
        return list(zip(time.tolist(), power.tolist(), strict=True))[::-1]
