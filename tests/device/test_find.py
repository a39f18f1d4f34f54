"""CUDA_VISIBLE_DEVICES to the one GPU that is ours: every form, and only ours is ever touched."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilter.core.errors import DriverMismatch, NoDevice, UsageError
from kilter.device.find import find, visible
from kilter.device.nvidia import Gpu
from kilter.testing.fake_card import Card, Rule
from kilter.testing.fake_nvml import FakeNvml

UUIDS = ("GPU-aaaa1111-x", "GPU-aaaa2222-x", "GPU-bbbb3333-x", "GPU-cccc4444-x")
GPUS = tuple(Gpu(index=i, uuid=uuid, name="H200") for i, uuid in enumerate(UUIDS))
MIG = (
    Gpu(index=0, uuid="GPU-0", name="A100", mig_uuids=("MIG-a1", "MIG-a2")),
    Gpu(index=1, uuid="GPU-1", name="A100"),
)
BY_BUS = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def indices(mask: str | None, gpus: tuple[Gpu, ...] = GPUS, **more: str) -> list[int]:
    environ = more if mask is None else {"CUDA_VISIBLE_DEVICES": mask, **more}
    return [gpu.index for gpu in visible(gpus, environ)]


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("2", [2]),
        ("3,1", [3, 1]),
        (" 1 , 0 ", [1, 0]),
        ("-1", []),
        ("0,-1,2", [0]),
        ("0,9,2", [0]),
        ("1,1", []),
        ("0,2,0", []),
        ("NoDevFiles", []),
        ("GPU-bbbb", [2]),
        ("GPU-cccc4444-x,GPU-aaaa1", [3, 0]),
        ("GPU-aaaa", []),
        ("GPU-bbbb,GPU-nobody,GPU-cccc", [2]),
        ("GPU-bbbb,GPU-bbbb3333", []),
        ("GPU-bbbb,0", [2]),
        ("0,GPU-bbbb", [0]),
    ],
)
def test_each_form_of_the_mask(mask: str | None, expected: list[int]) -> None:
    assert indices(mask) == expected


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ("MIG-a2", [0]),
        ("MIG-a1,MIG-a2", [0, 0]),
        ("MIG-GPU-1/3/0", [1]),
        ("MIG-GPU-9/3/0", []),
        ("MIG-nobody", []),
        ("MIG-a2,MIG-a2", []),
    ],
)
def test_mig_instances_lead_to_their_gpu(mask: str, expected: list[int]) -> None:
    assert indices(mask, MIG) == expected


@pytest.fixture(scope="module")
def cuda() -> ModuleType:
    return pytest.importorskip("torch.cuda", reason="the oracle is torch's own reader")


@given(
    mask=st.lists(
        st.one_of(
            st.integers(-1, 5).map(str),
            st.sampled_from([*UUIDS, "GPU-aaaa", "GPU-bbbb", "GPU-nobody", "1x", " 2", ""]),
        ),
        max_size=5,
    ).map(",".join)
)
def test_agrees_with_the_reader_in_torch(cuda: ModuleType, mask: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", mask)
        found = cuda._parse_visible_devices()
    if found and isinstance(found[0], str):
        found = cuda._transform_uuid_to_ordinals(found, list(UUIDS))
    expected = []
    for ordinal in found:
        if ordinal >= len(GPUS):  # torch leaves this check to CUDA, which stops here
            break
        expected.append(ordinal)
    # "1x" is read as 1; torch looks for repetitions also beyond the first missing GPU
    items = [item.strip().removesuffix("x") for item in mask.split(",")]
    repeats_a_missing_one = len(set(items)) < len(items) and not found
    if not repeats_a_missing_one:
        assert indices(mask) == expected


class TestUnequalGpus:
    GPUS = (*GPUS[:2], Gpu(index=2, uuid="GPU-old", name="V100"))

    @pytest.mark.parametrize("mask", [None, "1", "0,2"])
    def test_numbers_in_the_default_order_are_not_guessed(self, mask: str | None) -> None:
        with pytest.raises(NoDevice, match="CUDA_DEVICE_ORDER=PCI_BUS_ID"):
            indices(mask, self.GPUS)

    def test_numbers_in_bus_order_are_the_vendors(self) -> None:
        assert indices("2,0", self.GPUS, **BY_BUS) == [2, 0]

    def test_uuids_need_no_order(self) -> None:
        assert indices("GPU-old", self.GPUS) == [2]

    @pytest.mark.parametrize("mask", ["", "-1x"])
    def test_nothing_visible_needs_no_order(self, mask: str) -> None:
        assert indices(mask, self.GPUS) == []


# find ----------------------------------------------------------------------------------------


@pytest.fixture
def fake(tmp_path: Path) -> FakeNvml:
    return FakeNvml.create(tmp_path / "cards.json", Card(), Card(), Card(), Card())


def chosen(fake: FakeNvml, spec: str = "nvml", **environ: str) -> int | None:
    return find(spec, environ=environ, nvml=fake).info().index


def test_the_local_rank_picks_among_the_visible(fake: FakeNvml) -> None:
    assert chosen(fake) == 0
    assert chosen(fake, LOCAL_RANK="2") == 2
    assert chosen(fake, LOCAL_RANK="1", CUDA_VISIBLE_DEVICES="3,1") == 1
    assert chosen(fake, SLURM_LOCALID="3") == 3
    assert chosen(fake, SLURM_LOCALID="3", CUDA_VISIBLE_DEVICES="2") == 2


def test_only_the_chosen_gpu_is_opened(fake: FakeNvml) -> None:
    device = find("nvml", environ={"CUDA_VISIBLE_DEVICES": "3"}, nvml=fake)
    before = len(fake.calls())
    device.info()
    device.sample()
    device.settings()
    assert {call.card for call in fake.calls()[before:]} <= {None, 3}


def test_what_the_framework_says_wins(fake: FakeNvml) -> None:
    uuid = fake.state().cards[2].uuid
    assert find("nvml", uuid=uuid, environ={}, nvml=fake).info().index == 2


def test_a_rank_without_a_gpu_is_told(fake: FakeNvml) -> None:
    with pytest.raises(NoDevice, match="2 are visible"):
        chosen(fake, LOCAL_RANK="2", CUDA_VISIBLE_DEVICES="0,1")


def test_an_empty_mask_is_no_device_and_auto_says_why(fake: FakeNvml) -> None:
    with pytest.raises(NoDevice, match="CUDA_VISIBLE_DEVICES=''"):
        chosen(fake, CUDA_VISIBLE_DEVICES="")
    device = find("auto", environ={"CUDA_VISIBLE_DEVICES": ""}, nvml=fake)
    assert device.info().backend == "null"
    assert "CUDA_VISIBLE_DEVICES" in (device.info().refusal or "")


def test_auto_without_a_driver_is_null_and_nvml_is_an_error(fake: FakeNvml) -> None:
    with fake.edit() as state:
        state.init_error = fake.NVML_ERROR_LIB_RM_VERSION_MISMATCH
    info = find("auto", environ={}, nvml=fake).info()
    assert info.backend == "null"
    assert "reboot" in (info.refusal or "")
    with pytest.raises(DriverMismatch):
        find("nvml", environ={}, nvml=fake)


def test_auto_with_a_driver_is_nvml(fake: FakeNvml) -> None:
    assert find("auto", environ={}, nvml=fake).info().backend == "nvml"


def test_a_lost_gpu_of_ours_is_told_and_one_of_others_is_not(fake: FakeNvml) -> None:
    with fake.edit() as state:
        rule = Rule(call="nvmlDeviceGetUUID", card=1, error=fake.NVML_ERROR_GPU_IS_LOST)
        state.rules.append(rule)
    ours = find("nvml", local_rank=0, environ={}, nvml=fake)
    assert ours.info().uuid == fake.state().cards[0].uuid
    with pytest.raises(NoDevice, match="Xid"):
        find("nvml", local_rank=1, environ={}, nvml=fake)


@pytest.mark.parametrize("spec", ["sim:v100", "cuda", ""])
def test_an_unknown_spec_is_wrong_usage_and_lists_the_choices(spec: str) -> None:
    with pytest.raises(UsageError, match="auto, nvml, amdsmi, null"):
        find(spec, environ={})
