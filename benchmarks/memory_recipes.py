"""What share of the bytes that other people's models save for backward can be recomputed.

    python benchmarks/memory_recipes.py [--cases llama,gpt2,t5,bert] [--most 6]
    python benchmarks/memory_recipes.py --zoo vit,opt|all [--layers 12]
    python benchmarks/memory_recipes.py --vision torchvision:resnet50,timm:mixer_s16_224|all

One pass is tried as `kilter run --memory-budget` tries it: every datum with a recipe is recomputed
beside the real one and compared bit for bit. Printed are the share, and the largest kinds of data
that no operation recomputes. Needs transformers; without a GPU the models are tiny. With `--zoo`
the small architectures of `memory_zoo.py` are tried instead, with `--vision` networks of
torchvision, timm and diffusers on two small images, both on the CPU.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial

import torch
from memory_models import language, tokens

from kilter.memory.engine import CpuStandIn, Swapper
from kilter.memory.engine.backend import Backend
from kilter.memory.engine.pass_record import PassRecord
from kilter.memory.plan.problem import H200_PCIE5

CASES = ("llama", "gpt2", "t5", "bert")
VISION: dict[str, tuple[int, str]] = {
    "torchvision": (
        64,
        "alexnet vgg11_bn resnet50 resnext50_32x4d wide_resnet50_2 densenet121 shufflenet_v2_x1_0 "
        "mobilenet_v2 mobilenet_v3_small squeezenet1_1 mnasnet0_5 efficientnet_b0 "
        "efficientnet_v2_s regnet_y_400mf convnext_tiny swin_t swin_v2_t",
    ),
    "timm": (
        64,
        "resnet26d seresnet50 resnest14d dm_nfnet_f0 tf_efficientnetv2_s mobilevitv2_050 "
        "ghostnet_100 hrnet_w18_small convnextv2_atto edgenext_xx_small poolformer_s12 pvt_v2_b0 "
        "focalnet_tiny_srf davit_tiny",
    ),
    "timm ": (
        224,
        "mixer_s16_224 gmlp_ti16_224 xcit_nano_12_p16_224 cait_xxs24_224 deit_tiny_patch16_224 "
        "coatnet_nano_rw_224 levit_128s eva02_tiny_patch14_224",
    ),
    "diffusers": (32, "unet unet_text autoencoder transformer"),
}
"""By library, the side of the images that its networks get, and the networks."""
ROWS = 8
PASSES = 12
"""In which a trial comes, if there is one."""


def of_zoo(kind: str, layers: int | None = None) -> PassRecord:
    """The same for a small architecture of `memory_zoo.py`."""
    from memory_zoo import FAMILIES, batch, built

    family = next(name for name, (kinds, _) in FAMILIES.items() if kind in kinds.split())
    model = built(kind, family, layers).train()
    what = FAMILIES[family][1]
    return observed(lambda: model(**batch(model, what)).loss, model, CpuStandIn(spoil=True), 2048)


def of_vision(case: str) -> PassRecord:
    """The same for a network of torchvision, timm or diffusers."""
    library, name = case.split(":")
    side = next(
        side
        for key, (side, names) in VISION.items()
        if key.strip() == library and name in names.split()
    )
    torch.manual_seed(0)
    if library == "diffusers":
        return observed(*diffusion(name, side), CpuStandIn(spoil=True), 2048)
    if library == "torchvision":
        import torchvision

        model = torchvision.models.get_model(name, weights=None).train()
    else:
        import timm

        model = timm.create_model(name).train()
    images = torch.randn(2, 3, side, side)
    forward = lambda: model(images).float().square().mean()  # noqa: E731
    return observed(forward, model, CpuStandIn(spoil=True), 2048)


def diffusion(name: str, side: int) -> tuple[Callable[[], torch.Tensor], torch.nn.Module]:
    """A small network of diffusers and its loss."""
    import diffusers

    images, steps = torch.randn(2, 4, side, side), torch.tensor([1, 2])
    text = torch.randn(2, 7, 32)
    model: torch.nn.Module
    if name == "unet":
        model = diffusers.UNet2DModel(
            in_channels=4, out_channels=4, block_out_channels=(32, 64), layers_per_block=2,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        )  # fmt: skip
        forward = lambda: model(images, steps).sample.float().square().mean()  # noqa: E731
    elif name == "unet_text":
        model = diffusers.UNet2DConditionModel(
            block_out_channels=(32, 64), layers_per_block=1, cross_attention_dim=32,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), attention_head_dim=8,
        )  # fmt: skip
        forward = lambda: model(images, steps, text).sample.float().square().mean()  # noqa: E731
    elif name == "autoencoder":
        model = diffusers.AutoencoderKL(
            in_channels=4, out_channels=4, block_out_channels=(32, 64), latent_channels=4,
            down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        )  # fmt: skip
        forward = lambda: model(images).sample.float().square().mean()  # noqa: E731
    else:
        model = diffusers.DiTTransformer2DModel(
            num_attention_heads=4, attention_head_dim=16, in_channels=4, num_layers=3,
            sample_size=side, num_embeds_ada_norm=10,
        )  # fmt: skip
        labels = torch.tensor([0, 1])
        forward = lambda: (  # noqa: E731
            model(images, steps, class_labels=labels).sample.float().square().mean()
        )
    return forward, model.train()


def tried(case: str) -> PassRecord:
    """What a model saved in one pass, after its recipes and its modules' calls were tried."""
    small = not torch.cuda.is_available()
    device = torch.device("cpu" if small else "cuda")
    torch.manual_seed(0)
    model = language(case, small).to(device).train()
    samples = tokens(case, small, ROWS)
    batch = {key: torch.stack([row[key] for row in samples]).to(device) for key in samples[0]}
    if small:
        backend, min_bytes = CpuStandIn(spoil=True), 4096
    else:
        from kilter.memory.engine.cuda import Cuda

        backend, min_bytes = Cuda.open(), 2**20
    return observed(lambda: model(**batch).loss, model, backend, min_bytes)


def observed(
    forward: Callable[[], torch.Tensor], model: torch.nn.Module, backend: Backend, min_bytes: int
) -> PassRecord:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    swapper = Swapper(
        backend, budget_bytes=2**60, link=H200_PCIE5, min_bytes=min_bytes, segments=True
    )
    with swapper:
        for _ in range(PASSES):
            with torch.autocast(backend.device.type, torch.bfloat16):
                loss = forward()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if swapper.tried:
                break
        for reason, count in Counter(swapper.report().refused).most_common(4):
            print(f"  {count} x {reason.subject}: {reason.text}", flush=True)
        return max(swapper.records(), key=lambda found: len(found.data))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--most", type=int, default=6, help="kinds without a recipe to print")
    parser.add_argument("--zoo", default="", help="names of memory_zoo.py, or all")
    parser.add_argument("--layers", type=int, help="of the small architectures (2 or 3)")
    parser.add_argument("--vision", default="", help="LIBRARY:NETWORK of the list, or all")
    args = parser.parse_args()
    cases: list[str] = args.cases.split(",")
    look: Callable[[str], PassRecord] = tried
    if args.vision:
        every = [
            f"{key.strip()}:{name}" for key, (_, names) in VISION.items() for name in names.split()
        ]
        cases, look = every if args.vision == "all" else args.vision.split(","), of_vision
    if args.zoo:
        from memory_zoo import FAMILIES

        kinds = [kind for names, _ in FAMILIES.values() for kind in names.split()]
        cases = kinds if args.zoo == "all" else args.zoo.split(",")
        look = partial(of_zoo, layers=args.layers)
    failed = False
    for case in cases:
        try:
            record = look(case)
        except (RuntimeError, ValueError, TypeError, AttributeError, AssertionError) as error:
            print(f"{case}: not tried, {type(error).__name__}: {error}", flush=True)
            failed = True
            continue
        data = record.data
        called = {number for segment in record.segments for number in record.members(segment)}
        total_bytes = sum(datum.size_bytes for datum in data)
        again_bytes = sum(d.size_bytes for d in data if d.recompute_s is not None)
        either_bytes = sum(
            datum.size_bytes
            for number, datum in enumerate(data)
            if datum.recompute_s is not None or number in called
        )
        differ = sum(d.recipe is not None and d.recompute_s is None for d in data)
        print(
            f"{case}: {again_bytes / total_bytes:.0%} of {total_bytes / 2**20:.0f} MiB can be "
            f"recomputed by operations, {either_bytes / total_bytes:.0%} or segments; "
            f"{differ} data have a recipe that is not equal or was refused",
            flush=True,
        )
        left: Counter[str] = Counter()
        for number, datum in enumerate(data):
            if datum.recompute_s is None:
                inside = " (in a segment)" if number in called else ""
                left[datum.name.split(": ", 1)[-1] + inside] += datum.size_bytes
        for name, size_bytes in left.most_common(args.most):
            print(f"  {size_bytes / total_bytes:5.1%}  {name}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
