"""What is told to whoever has run out of memory: the peak by module, and what a job can do."""

from __future__ import annotations

import torch
from torch import nn

from kilter.core.errors import BudgetTooSmall
from kilter.core.units import MIB
from kilter.memory import messages
from kilter.memory.at_peak import at_peak
from kilter.memory.engine import CpuStandIn, Swapper
from kilter.memory.engine.module_path import ModulePaths
from kilter.memory.plan.problem import Link

LINK = Link(to_host_bytes_per_s=1e9, to_device_bytes_per_s=1e9, both_bytes_per_s=2e9)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).sigmoid()[:, :8]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = Block()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return x.exp()


def watched(run: object, times: int = 2) -> str:
    with Swapper(CpuStandIn(), budget_bytes=10**12, link=LINK, min_bytes=2048) as swapper:
        for _ in range(times):
            run()  # type: ignore[operator]
        record = swapper.largest_pass()
    assert record is not None
    return at_peak(record)


def test_layers_alike_count_together() -> None:
    net = Net()
    told = watched(lambda: net(torch.randn(MIB // 32, 8)).sum().backward())
    assert told == (
        "18.0 MiB of saved tensors: 12.0 MiB in layers.* (3 tensors), "
        "4.0 MiB in stem (1 tensor), 1.0 MiB in stem.up (1 tensor), 1.0 MiB in others"
    )


def test_what_no_module_has_saved() -> None:
    weight = torch.randn(64, 64, requires_grad=True)
    told = watched(lambda: (torch.randn(64, 64) @ weight).exp().sum().backward())
    assert told == "32.0 KiB of saved tensors: 32.0 KiB outside of modules (2 tensors)"


def test_a_path_goes_from_the_outermost_call_to_the_innermost() -> None:
    paths, seen = ModulePaths(), []
    net = Net()
    for module in (net.layers[1], net.layers[1].up, net):
        module.register_forward_pre_hook(lambda *_: seen.append(paths.present()))
    net(torch.randn(2, 8))
    assert seen == ["Net", "layers.1", "layers.1.up"]
    assert paths.present() == ""


def test_a_module_that_is_no_part_of_the_one_that_calls_it_has_the_name_of_its_class() -> None:
    paths, seen = ModulePaths(), []
    borrowed = nn.Linear(8, 8)
    borrowed.register_forward_pre_hook(lambda *_: seen.append(paths.present()))

    class Outer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return borrowed(x)  # type: ignore[no-any-return]

    Outer()(torch.randn(2, 8))
    assert seen == ["Linear"]


def test_modules_that_list_others_in_a_way_of_their_own() -> None:
    class Hidden(nn.Sequential):
        def named_modules(self, *_: object, **__: object) -> object:  # type: ignore[override]
            raise RuntimeError("not for you")

    paths, seen = ModulePaths(), []
    net = Hidden(nn.Linear(8, 8))
    net[0].register_forward_pre_hook(lambda *_: seen.append(paths.present()))
    net(torch.randn(2, 8))
    assert seen == ["0"]


def test_why_there_is_no_plan_is_not_why_a_tensor_is_not_recomputed() -> None:
    part = messages.recipe_differs("3: MulBackward0")
    assert messages.no_plan([part]) == "no plan so far: no pass of the job has come again yet"
    whole = messages.of_error(BudgetTooSmall("the budget is below what operations need"))
    assert messages.no_plan([part, whole]).endswith(": the budget is below what operations need")
