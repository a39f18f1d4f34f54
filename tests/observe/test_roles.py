"""What a rank does is told by the parameters that it steps."""

import pytest

torch = pytest.importorskip("torch")

from kilter.observe.iteration_clock import IterationClock  # noqa: E402


def test_a_role_is_told_by_what_is_stepped():
    def role(*layers):
        model = torch.nn.Sequential(*layers)
        marks = IterationClock(lambda index, t_s: None)
        marks.start()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.step()
        marks.stop()
        return marks.role

    linear, norm = torch.nn.Linear, torch.nn.LayerNorm
    assert role(linear(4, 4), norm(4)) == role(norm(4), linear(4, 4))
    assert role(linear(4, 4)) != role(linear(4, 4), linear(4, 4))
    assert role(linear(4, 4)) != role(linear(4, 4).double())
