"""Architectures of transformers against their plain run, bit for bit, on the CPU stand-in.

    python benchmarks/memory_zoo.py [--only llama,vit] [--steps 12] [--segments] [--out zoo.jsonl]

Each architecture is built small, with random weights, and trained plain and with half of the peak
of its saved data as the budget: activations alone, with optimizer state streaming in the step, and
with gradients consumed, state streaming and weights moving; in fp32 and under bfloat16 autocast. An
evaluation comes in between. Compared are all losses and all parameters. Needs transformers.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

from kilter.memory.engine import CpuStandIn, Swapper, SwapReport
from kilter.memory.engine.state import StateMover
from kilter.memory.engine.weights import WeightMover
from kilter.memory.plan.problem import Link

LINK = Link(to_host_bytes_per_s=2e7, to_device_bytes_per_s=2e7, both_bytes_per_s=3e7)
"""Slow, so that much is recomputed."""
SHARE = 0.5
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
LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "num_layers",
    "n_layers",
    "encoder_layers",
    "decoder_layers",
)
SMALL_VISION = {"hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"}


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
    if what == "images":
        size = getattr(model.config, "image_size", None)
        size = size if isinstance(size, int) and size <= 64 else 64
        return {
            "pixel_values": torch.randn(2, 3, size, size),
            "labels": torch.randint(0, 5, (2,)),
        }
    tokens = torch.randint(3, TOKENS, (3, 16))
    return {"input_ids": tokens, "labels": tokens.clone()}


def train(
    model: torch.nn.Module, what: str, *, steps: int, autocast: bool, stack: ExitStack
) -> list[torch.Tensor]:
    """Losses and, when everything has come home, parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = []
    torch.manual_seed(1)
    with stack:
        for step in range(steps):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(**batch(model, what)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().clone())
            if step % 5 == 4:
                model.eval()
                with torch.no_grad():
                    losses.append(model(**batch(model, what)).loss)
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
    kind: str, family: str, what: str, steps: int, *, segments: bool
) -> Iterator[dict[str, Any]]:
    for autocast in (False, True):

        def run(
            stack: ExitStack, model: torch.nn.Module, autocast: bool = autocast
        ) -> list[torch.Tensor]:
            return train(model, what, steps=steps, autocast=autocast, stack=stack)

        try:
            plain = run(ExitStack(), built(kind, family).train())
        except (RuntimeError, ValueError, TypeError, AttributeError, AssertionError) as error:
            yield {"kind": kind, "autocast": autocast, "not built": str(error)[:90]}
            return
        watch = Swapper(CpuStandIn(spoil=True), budget_bytes=10**12, link=LINK, min_bytes=2048)
        stack = ExitStack()
        stack.enter_context(watch)
        run(stack, built(kind, family).train())
        budget_bytes = int(SHARE * max(record.peak_bytes for record in watch.records()))
        for mode in ("activations", "in the step", "everything"):
            model = built(kind, family).train()
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
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    only = options.only.split(",") if options.only else None
    wrong = 0
    for family, (kinds, what) in FAMILIES.items():
        for kind in kinds.split():
            if only and kind not in only:
                continue
            for row in rows(kind, family, what, options.steps, segments=options.segments):
                wrong += bool(row.get("different"))
                print(json.dumps(row), flush=True)
                if options.out:
                    with options.out.open("a") as file:
                        file.write(json.dumps(row) + "\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
