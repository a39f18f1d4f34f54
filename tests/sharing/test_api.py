"""`kilter.share` in a script, without a daemon."""

import json
import socket
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))
import ranks


def run(warm, out, *arguments):
    out.mkdir()
    ranks.run(warm, 2, out, None, *arguments, script="api_script.py")
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_three_lines_train_the_same_at_any_ratio(warm, tmp_path):
    even, skewed = (
        run(warm, tmp_path / "even"),
        run(warm, tmp_path / "skewed", "--ratios", "7,3"),
    )
    for a, b in zip(even[0]["parameters"], skewed[0]["parameters"], strict=True):
        assert a == pytest.approx(b, abs=1e-5)
    # 40 steps, the batch of 90 % 16 = 10 samples at the end of each pass included.
    assert len(even[0]["shapes"]) == len(skewed[0]["shapes"]) == 40
    assert set(even[0]["shapes"]) == {8, 5}
    assert {11, 7} <= set(skewed[0]["shapes"])
    together = [a + b for a, b in zip(skewed[0]["shapes"], skewed[1]["shapes"], strict=True)]
    assert set(together) == {16, 10}
    assert ["init_process_group" in told for told in even[0]["refused"]] == [True] + [False] * 5
    assert "or sharded by fully_shard, not a Linear" in even[0]["refused"][1]
    assert "smaller than the 2 ranks" in even[0]["refused"][2]
    assert "sum to 10" in even[0]["refused"][3]
    assert "a share of 0 needs idle_ranks=True" in even[0]["refused"][4]
    assert "sharded by fully_shard, so that its ratio is 1 to 10" in even[0]["refused"][5]


def test_ranks_of_two_nodes_agree_through_the_name_of_the_first(warm, tmp_path):
    one, other = run(warm, tmp_path / "nodes", "--ratios", "7,3", "--two-nodes")
    assert one["host"] == other["host"] == socket.gethostname()
    assert {11, 7} <= set(one["shapes"])
    assert one["parameters"] == other["parameters"]
