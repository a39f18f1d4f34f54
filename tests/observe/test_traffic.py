"""Bytes of framework operations from the shapes of their inputs."""

import pytest

from kilter.observe.traffic import bytes_moved

F, H, L = "float", "c10::Half", "long int"


@pytest.mark.parametrize(
    ("name", "shapes", "types", "expected"),
    [
        ("aten::mm", [[4, 8], [8, 16]], [F, F], 4 * (32 + 128 + 64)),
        ("aten::addmm", [[16], [4, 8], [8, 16], [], []], [H, H, H, "Scalar", "Scalar"],
         2 * (16 + 32 + 128 + 64)),
        ("aten::linear", [[2, 4, 8], [16, 8], [16]], [F, F, F], 4 * (64 + 128 + 16 + 128)),
        ("aten::relu", [[10, 10]], [F], 800),
        ("aten::add_", [[10], [10], []], [F, F, "Scalar"], 120),
        ("aten::sum", [[1000], []], [F, "Scalar"], 4000),
        ("aten::copy_", [[100], [100], []], [H, F, "Scalar"], 600),
        ("aten::cat", [[[2, 3], [4, 3]], []], ["TensorList", "Scalar"], 2 * 4 * 18),
        ("aten::view", [[8, 8], []], [F, "ScalarList"], 0),
        ("aten::embedding", [[50000, 64], [8, 16]], [F, L], 128 * 8 + 2 * 128 * 64 * 4),
        ("aten::_fused_adamw_", [[[100]], [[100]], [[100]], [[100]]], ["TensorList"] * 4,
         4 * 400 + 3 * 400),
        ("aten::whatever", [], [], 0),
        ("aten::empty", [[], []], ["ScalarList", "Scalar"], 0),
    ],
)  # fmt: skip
def test_bytes_moved(name, shapes, types, expected):
    assert bytes_moved(name, shapes, types) == expected
