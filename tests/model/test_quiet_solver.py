"""What a solver prints would stand in the output of the program that kilter runs."""

import pytest

from kilter.model.quiet_solver import quiet_solver

pytest.importorskip("highspy")


def test_a_solver_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    solver = quiet_solver()
    x = solver.addVariable(lb=1.0, ub=4.0)
    solver.minimize(2.0 * x)
    assert solver.getObjectiveValue() == 2.0
    assert capfd.readouterr() == ("", "")
