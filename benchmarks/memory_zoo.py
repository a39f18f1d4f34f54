"""Architectures of transformers and timm against their plain run, bit for bit, on the stand-in.

    python benchmarks/memory_zoo.py [--only llama,vit] [--steps 12] [--segments] [--out zoo.jsonl]
        [--others | --timm] [--modes activations] [--part 1/2]

Each architecture is built small, with random weights, and trained plain and with half of the peak
of its saved data as the budget (or somewhat more than the least that is possible): activations
alone, with optimizer state streaming in the step, and with gradients consumed, state streaming and
weights moving; in fp32 and under bfloat16 autocast. An evaluation comes in between. Compared are
all losses and all parameters. Needs transformers. `--others` tries every architecture that is not
in the list here, as far as it can be built small, `--timm` one network of each module of timm.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import transformers

from kilter.memory.engine import CpuStandIn, Swapper, SwapReport
from kilter.memory.engine.state import StateMover
from kilter.memory.engine.weights import WeightMover
from kilter.memory.plan.problem import Link

LINK = Link(to_host_bytes_per_s=2e7, to_device_bytes_per_s=2e7, both_bytes_per_s=3e7)
"""Slow, so that much is recomputed."""
SHARE = 0.5
ROOM = 0.3
"""The budget has at least this share of what lies between the least possible peak and plain's."""
LARGEST = 25_000_000
"""A network of more parameters is not tried."""
ALONE_S = 1e-3
"""Counts for each tensor that is recomputed alone or offloaded where calls are recomputed, so that
they are."""
TOKENS = 120

FAMILIES: dict[str, tuple[str, str]] = {
    "AutoModelForCausalLM": (
        "gpt2 llama mistral mixtral qwen2 qwen2_moe qwen3 qwen3_moe gemma gemma2 gemma3_text phi "
        "phi3 falcon bloom opt gptj gpt_neo gpt_neox gpt_bigcode olmo olmo2 stablelm starcoder2 "
        "mamba mamba2 mpt codegen cohere granite granitemoe persimmon xglm biogpt glm nemotron",
        "tokens",
    ),
    "AutoModelForMaskedLM": (
        "bert roberta deberta-v2 distilbert electra albert mpnet convbert fnet roformer "
        "nystromformer modernbert mobilebert layoutlm ibert big_bird",
        "tokens",
    ),
    "AutoModelForSeq2SeqLM": (
        "t5 mt5 umt5 longt5 switch_transformers bart pegasus blenderbot mbart",
        "tokens",
    ),
    "AutoModelForImageClassification": (
        "vit beit resnet regnet segformer poolformer mobilevit dinov2 pvt mobilenet_v2 "
        "convnextv2 cvt efficientnet",
        "images",
    ),
}
SMALL: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": TOKENS, "max_position_embeddings": 64, "n_embd": 64,
    "n_layer": 3, "n_head": 4, "n_positions": 64, "n_inner": 96, "d_model": 64, "num_layers": 3,
    "num_heads": 4, "d_ff": 96, "d_kv": 16, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96, "ffn_dim": 96, "word_embed_proj_dim": 64, "head_dim": 16,
    "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "state_size": 8,
    "embedding_size": 32, "attention_types": [[["global", "local"], 2]], "sliding_window": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    "query_pre_attn_scalar": 16, "dim": 64, "hidden_dim": 96, "n_heads": 4, "n_layers": 3,
}  # fmt: skip
MODES = ("activations", "in the step", "everything")
LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "num_layers",
    "n_layers",
    "encoder_layers",
    "decoder_layers",
)
SMALL_VISION = {"hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"}


AUTO = {
    "CAUSAL_LM": ("AutoModelForCausalLM", "tokens"),
    "MASKED_LM": ("AutoModelForMaskedLM", "tokens"),
    "SEQ_TO_SEQ_CAUSAL_LM": ("AutoModelForSeq2SeqLM", "tokens"),
    "IMAGE_CLASSIFICATION": ("AutoModelForImageClassification", "images"),
    "SEQUENCE_CLASSIFICATION": ("AutoModelForSequenceClassification", "classes"),
    "AUDIO_CLASSIFICATION": ("AutoModelForAudioClassification", "audio"),
}
"""Where transformers lists its architectures, and what they are fed with."""
TIMM_SMALLER: tuple[dict[str, Any], ...] = (
    {"depth": 2, "embed_dim": 96, "num_heads": 3},
    {"depth": 2, "embed_dim": 96},
    {"depth": 2},
    {"depths": (1, 1, 1, 1)},
    {"layers": (1, 1, 1, 1)},
    {},
)
"""Arguments that make a network of timm small, where it takes them."""


class Case(NamedTuple):
    """An architecture, how it is built, and what it is fed with."""

    name: str
    build: Callable[[], torch.nn.Module]
    what: str


def listed() -> Iterator[Case]:
    for family, (kinds, what) in FAMILIES.items():
        for kind in kinds.split():
            yield Case(kind, partial(built, kind, family), what)


def others() -> Iterator[Case]:
    from transformers.models.auto import modeling_auto

    seen = {case.name for case in listed()}
    for mapping, (family, what) in AUTO.items():
        for kind in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES"):
            if kind not in seen:
                seen.add(kind)
                yield Case(kind, partial(built, kind, family), what)


def of_timm() -> Iterator[Case]:
    import timm

    for module in sorted(timm.list_modules()):
        names = timm.list_models(module=module)
        small = [
            n for n in names if any(s in n for s in ("atto", "nano", "xx", "tiny", "_s", "18"))
        ]
        if names:
            yield Case(module, partial(small_timm, (small or names)[0]), "pictures")


def small_timm(name: str) -> torch.nn.Module:
    import timm

    torch.manual_seed(0)
    for smaller in TIMM_SMALLER:
        with suppress(TypeError, RuntimeError, AssertionError, IndexError, ValueError):
            model: torch.nn.Module = timm.create_model(name, drop_rate=0.1, **smaller)
            return model
    raise ValueError(f"{name} takes other arguments")


def built(kind: str, family: str, layers: int | None = None) -> torch.nn.Module:
    """The architecture, with so many layers where its configuration says how many there are."""
    torch.manual_seed(0)
    sizes = SMALL if layers is None else SMALL | dict.fromkeys(LAYERS, layers)
    of_kind = transformers.models.auto.configuration_auto.CONFIG_MAPPING[kind]
    if family == "AutoModelForImageClassification":
        config = of_kind(num_labels=5)
        for key in SMALL_VISION:
            if isinstance(getattr(config, key, None), int):
                setattr(config, key, sizes[key])
        for key, value in (("image_size", 32), ("patch_size", 8)):
            if isinstance(getattr(config, key, None), int):
                setattr(config, key, value)
    elif kind == "mamba2":
        config = of_kind(
            hidden_size=64, num_heads=8, head_dim=16, state_size=8, num_hidden_layers=layers or 2,
            vocab_size=TOKENS, n_groups=2, chunk_size=8,
        )  # fmt: skip
    else:
        config = of_kind()
        for key, value in sizes.items():
            if hasattr(config, key) or key == "decoder_start_token_id":
                with suppress(AttributeError, ValueError, TypeError):  # derived from another one
                    setattr(config, key, copy.deepcopy(value))
    return getattr(transformers, family).from_config(config)


def batch(model: torch.nn.Module, what: str) -> dict[str, torch.Tensor]:
    if what == "pictures":
        side = model.default_cfg["input_size"][-1] if model.default_cfg["fixed_input_size"] else 64
        return {"x": torch.randn(2, 3, side, side)}
    if what == "audio":
        return {"input_values": torch.randn(2, 4000), "labels": torch.tensor([0, 1])}
    if what == "classes":
        tokens = torch.randint(3, TOKENS, (3, 16))
        return {"input_ids": tokens, "labels": torch.tensor([0, 1, 1])}
    if what == "images":
        size = getattr(model.config, "image_size", None)
        size = size if isinstance(size, int) and size <= 64 else 64
        return {
            "pixel_values": torch.randn(2, 3, size, size),
            "labels": torch.randint(0, 5, (2,)),
        }
    tokens = torch.randint(3, TOKENS, (3, 16))
    return {"input_ids": tokens, "labels": tokens.clone()}


def loss_of(model: torch.nn.Module, what: str) -> torch.Tensor:
    found = model(**batch(model, what))
    if what != "pictures":
        loss: torch.Tensor = found.loss
        return loss
    several = found if isinstance(found, tuple | list) else [found]
    return torch.stack([one.float().square().mean() for one in several]).sum()


def train(
    model: torch.nn.Module, what: str, *, steps: int, autocast: bool, stack: ExitStack
) -> list[torch.Tensor]:
    """Losses and, when everything has come home, parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = []
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    with stack:
        for step in range(steps):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = loss_of(model, what)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().clone())
            if step % 5 == 4:
                model.eval()
                with torch.no_grad():
                    losses.append(loss_of(model, what))
                model.train()
    return losses + [p.detach() for p in model.parameters()]


class Roomy(CpuStandIn):
    """Little of its memory is in use: in a step there is room for all state."""

    def used_bytes(self) -> int:
        return 0


def in_the_step(stack: ExitStack, swapper: Swapper, weight_bytes: int) -> None:
    """Optimizer state moves as well; gradients are kept."""
    state = StateMover(
        Roomy(lag=8, spoil=True),
        link=LINK,
        gradients="keep",
        room_bytes=weight_bytes // 2,
        bucket_bytes=weight_bytes // 8,
        min_bytes=1024,
        before_update=swapper.before_update,
        changed=swapper.weigh_anew,
    )
    state.keep_within(10**12)
    stack.enter_context(state)
    stack.enter_context(swapper)


def everything(stack: ExitStack, swapper: Swapper, weight_bytes: int) -> None:
    """Gradients, optimizer state and weights move as well."""
    weights = WeightMover(CpuStandIn(spoil=True), link=LINK, min_bytes=2048, own_hooks=False)

    def before_update(parameters: Any) -> None:
        parameters = list(parameters)
        swapper.before_update(parameters)
        weights.before_update(parameters)

    state = StateMover(
        CpuStandIn(spoil=True),
        link=LINK,
        gradients="consume",
        room_bytes=weight_bytes // 2,
        bucket_bytes=weight_bytes // 8,
        min_bytes=1024,
        before_update=before_update,
        changed=swapper.forget,
    )
    stack.enter_context(state)
    stack.enter_context(swapper)
    stack.enter_context(weights)
    assert swapper.hooks.stand_behind(weights.around)
    stack.callback(lambda: swapper.hooks.stand_behind(lambda pack, unpack: (pack, unpack)))


def rows(
    case: Case, steps: int, modes: tuple[str, ...], *, segments: bool
) -> Iterator[dict[str, Any]]:
    kind, build, what = case
    for autocast in (False, True):

        def run(
            stack: ExitStack, model: torch.nn.Module, autocast: bool = autocast
        ) -> list[torch.Tensor]:
            return train(model, what, steps=steps, autocast=autocast, stack=stack)

        try:
            if sum(p.numel() for p in build().parameters()) > LARGEST:
                raise ValueError("too large")
            plain = run(ExitStack(), build().train())
        except (
            RuntimeError, ValueError, TypeError, AttributeError, AssertionError, LookupError,
            ImportError, NotImplementedError,
        ) as error:  # fmt: skip
            yield {"kind": kind, "autocast": autocast, "not built": str(error)[:90]}
            return
        watch = Swapper(CpuStandIn(spoil=True), budget_bytes=10**12, link=LINK, min_bytes=2048)
        stack = ExitStack()
        stack.enter_context(watch)
        run(stack, build().train())
        record = max(watch.records(), key=lambda record: record.peak_bytes)
        problem, _ = record.problem(link=LINK, budget_bytes=10**12, min_bytes=2048)
        least, most = problem.floor_bytes, record.peak_bytes
        budget_bytes = int(max(SHARE * most, least + ROOM * (most - least)))
        for mode in modes:
            model = build().train()
            swapper = Swapper(
                CpuStandIn(lag=8, spoil=True),
                budget_bytes=budget_bytes,
                link=LINK,
                min_bytes=2048,
                segments=segments,
                alone_s=ALONE_S,
            )
            stack, report = ExitStack(), list[SwapReport]()
            weight_bytes = sum(p.nbytes for p in model.parameters())
            if mode == "everything":
                everything(stack, swapper, weight_bytes)
            elif mode == "in the step":
                in_the_step(stack, swapper, weight_bytes)
            else:
                stack.enter_context(swapper)
            stack.callback(lambda s=swapper, r=report: r.append(s.report()))
            moved = run(stack, model)
            different = sum(
                not torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
                for a, b in zip(plain, moved, strict=True)
            )
            (now,) = report
            yield {
                "kind": kind, "autocast": autocast, "mode": mode, "tensors": len(plain),
                "different": different, "planned": now.planned, "recomputed": now.recomputed,
                "out_bytes": now.out_bytes, "late": now.late, "deviations": now.deviations,
                "refused": tuple(map(str, now.refused[-1:])) if not now.planned else (),
            }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="architectures, separated by commas")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument(
        "--segments", action="store_true", help="calls of modules are recomputed, whole or in part"
    )
    parser.add_argument("--out", type=Path, help="JSON lines")
    parser.add_argument("--modes", default=",".join(MODES), help="some of %(default)s")
    parser.add_argument(
        "--part", default="1/1", help="I/N: every Nth architecture, from the Ith on"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--others", action="store_true", help="what is not in the list here")
    which.add_argument("--timm", action="store_true", help="one network of each module of timm")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    only = options.only.split(",") if options.only else None
    first, parts = map(int, options.part.split("/"))
    cases = others() if options.others else of_timm() if options.timm else listed()
    wrong = 0
    for case in [case for case in cases if not only or case.name in only][first - 1 :: parts]:
        for row in rows(
            case, options.steps, tuple(options.modes.split(",")), segments=options.segments
        ):
            wrong += bool(row.get("different"))
            print(json.dumps(row), flush=True)
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
