"""Who am I in the job: torchrun's variables, then those of a Slurm step, else alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilter.core.ranks import Ranks, ranks

SLURM = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Ranks(0, 1, 0)),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, Ranks(3, 4, 1)),
        ({"RANK": "3", "WORLD_SIZE": "4"}, Ranks(3, 4, 0)),
        (SLURM, Ranks(5, 8, 1)),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", **SLURM}, Ranks(0, 2, 0)),
        # A batch script outside of srun: one process, though eight tasks were asked for.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}, Ranks(0, 1, 0)),
        ({"RANK": "4", "WORLD_SIZE": "4"}, Ranks(0, 1, 0)),
        ({"RANK": "first", "WORLD_SIZE": "4"}, Ranks(0, 1, 0)),
        ({"LOCAL_RANK": "2"}, Ranks(0, 1, 0)),
    ],
)
def test_ranks_come_from_the_launcher(environ: dict[str, str], expected: Ranks) -> None:
    assert ranks(environ) == expected


@given(
    st.dictionaries(
        st.sampled_from(["RANK", "WORLD_SIZE", "LOCAL_RANK", *SLURM]),
        st.one_of(st.text(max_size=3), st.integers(-2, 9).map(str)),
    )
)
def test_any_environment_gives_a_possible_place(environ: dict[str, str]) -> None:
    place = ranks(environ)
    assert 0 <= place.rank < place.world_size
    assert place.local_rank >= 0
