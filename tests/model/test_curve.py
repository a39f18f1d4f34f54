"""Curves pass through what was measured, know what they do not know, and stay monotone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilter.model.curve import Prior, krige, monotone

PRIORS = (Prior(slope=-0.5), Prior(slope=-0.2))
place = st.floats(-1.5, 0.0)
points = st.lists(st.tuples(place, place), min_size=1, max_size=8, unique=True)


@given(points)
def test_measured_points_are_met(where):
    x = np.array(where)
    values = 0.3 * x[:, 0] ** 2 - 0.4 * x[:, 1]
    mean, _ = krige(x, values, np.full(len(x), 1e-5), x, PRIORS)
    far = np.abs(x).max(axis=1) > 0.05
    distinct = far & (np.abs(x[:, None] - x[None]).max(axis=2) + np.eye(len(x)) > 0.05).all(axis=1)
    assert np.allclose(mean[distinct], values[distinct], atol=5e-3)


def test_a_request_that_changes_nothing_is_near_the_reference():
    mean, sd = krige(np.zeros((0, 2)), np.zeros(0), np.zeros(0), np.zeros((1, 2)), PRIORS)
    assert mean[0] == 0.0
    assert sd[0] < 0.05


def test_neighbours_tell_of_each_other():
    """Two probed clocks, with a noise of 0.7 %: a third between them is known as well as if it had
    been probed, and one far below is not."""
    x = np.array([[-0.38, 0.0], [-0.42, 0.0]])
    q = np.array([[-0.40, 0.0], [-0.8, 0.0]])
    mean, sd = krige(x, np.array([0.10, 0.11]), np.full(2, 0.007), q, PRIORS)
    assert mean[0] == pytest.approx(0.105, abs=0.004)
    assert sd[0] < 0.0105
    assert sd[1] > 0.03


@given(points, st.tuples(place, place))
def test_a_measurement_never_makes_us_less_sure(where, query):
    x = np.array(where)
    q = np.array([query])
    _, before = krige(np.zeros((0, 2)), np.zeros(0), np.zeros(0), q, PRIORS)
    _, after = krige(x, np.zeros(len(x)), np.full(len(x), 0.01), q, PRIORS)
    assert after[0] <= before[0] + 1e-9


def test_no_measurement_gives_the_prior():
    q = np.array([[-0.5, 0.0]])
    mean, sd = krige(np.zeros((0, 2)), np.zeros(0), np.zeros(0), q, PRIORS)
    assert mean[0] == pytest.approx(0.25)
    assert sd[0] > 0.1


@given(points, st.lists(st.tuples(place, place), min_size=2, max_size=20), st.booleans())
def test_monotone_contradicts_no_measured_point(where, queries, rising):
    x, q = np.array(where), np.array(queries)
    sign = 1.0 if rising else -1.0
    values = sign * (x[:, 0] + 0.5 * x[:, 1])  # truly monotone, so envelopes never cross
    wild = np.random.default_rng(len(where)).normal(0, 3, len(q))
    clipped = monotone(x, values, q, wild, rising=rising)
    for value, at in zip(clipped, q, strict=True):
        for seen, known in zip(values, x, strict=True):
            if (known >= at).all():
                assert sign * value <= sign * seen + 1e-9
            if (known <= at).all():
                assert sign * value >= sign * seen - 1e-9


def test_contradicting_measurements_are_averaged():
    x = np.array([[0.0], [-1.0]])
    q = np.array([[-0.5]])
    falling = monotone(x, np.array([0.2, 0.0]), q, np.array([9.0]), rising=False)
    assert falling[0] == pytest.approx(0.1)
