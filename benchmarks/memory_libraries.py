"""Models of libraries, and the GPT of `gpt.py`: plain, with their own checkpointing, and under a
memory budget.

    python benchmarks/memory_libraries.py --out DIR [--models resnet152,llama] [--limit-s 500]

For each model there is a process for each arm, started as a user starts it: `plain`; `checkpoint`
(the library's own activation checkpointing, or each block by `torch.utils.checkpoint` where the
library has none); `governed`, `segments` and `auto` (kilter with the peak that `checkpoint` had as
its budget, without and with whole calls of modules recomputed, and left to choose); and shares of
plain's peak (`75%`, left to choose; `75%+consume` with `--gradients consume`). Only one process
trains at a time.

A host that others use as well is slower for minutes now and then. So once an arm has trained its
first iterations, it and `checkpoint` (or, for a share, `plain`) are timed by turns, in `--rounds`,
and what counts is the median of their ratio over the rounds. In each turn the iterations are timed
twice: in a loop that runs on, and in one that waits for the device in every iteration. What an arm
measures for its plan and its choice comes from a loop that runs on, unless `--wait` is given.

The loop is bf16 autocast with a fused AdamW, random data and random weights. One JSON line per arm
in DIR/memory_libraries.jsonl. Needs the libraries that a model names (timm, torchvision,
transformers, diffusers). This file is also the training script, which knows nothing of kilter.
Without a GPU it trains tiny models, which only tests this script.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import operator
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

TIMED = 6
"""Iterations of each of the two timed loops of a turn."""
WARM = 6
"""Iterations before the timed ones in the arms that have nothing to plan."""
RECOMPUTE = {"governed": "operations", "segments": "segments", "auto": "auto"}
"""The arms at checkpointing's peak, and what they recompute."""
ARMS = ("plain", "checkpoint", *RECOMPUTE)
CONSUME = "+consume"
"""A share of plain's peak with this behind it has gradients used up as they arrive."""
CHOOSING = 128
"""More iterations before the timed ones in an arm that chooses."""
AGAIN = 2
"""Iterations before the timed ones where an arm has its turn again."""
SMALL_BATCH = 4


# Models ------------------------------------------------------------------------------------------


class Job(NamedTuple):
    """A model, its batch, and what it is fed with."""

    library: str
    name: str
    batch: int
    feed: str
    blocks: str = ""
    """Classes that are checkpointed where the library has no switch for it."""
    more: dict[str, Any] = {}  # noqa: RUF012 (a NamedTuple's default is never written to)


def _wide(width: int, layers: int, **more: Any) -> dict[str, Any]:
    """A configuration of transformers under the names that its families use."""
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
        "use_cache": False,
        **more,
    }


GPT2 = {"n_embd": 1600, "n_layer": 48, "n_head": 25}
"""1.5 billion parameters, as published; its cache is on, as it is by default."""
JOBS = {
    "gpt": Job("gpt", "GPT 1.64B", 8, "tokens"),
    "gpt-dropout": Job("gpt", "GPT 1.64B", 8, "tokens", more={"dropout": 0.1}),
    "gpt2": Job("transformers", "GPT2", 8, "words", more=GPT2),
    "gpt2-no-cache": Job("transformers", "GPT2", 8, "words", more={**GPT2, "use_cache": False}),
    "llama": Job("transformers", "Llama", 8, "words", more=_wide(2048, 16, intermediate_size=8192)),
    "unet": Job("diffusers", "UNet2DModel", 16, "noise"),
    "vit": Job("timm", "vit_large_patch16_224", 128, "images"),
    "swin": Job("timm", "swin_base_patch4_window7_224", 128, "images"),
    "efficientnet": Job("timm", "tf_efficientnetv2_m", 128, "images"),
    "resnet152": Job("torchvision", "resnet152", 256, "images", "Bottleneck"),
    "bert": Job(
        "transformers", "Bert", 32, "words512", more=_wide(1024, 24, intermediate_size=4096)
    ),
    "t5": Job(
        "transformers",
        "T5",
        16,
        "words512",
        more={"d_model": 1024, "d_ff": 2816, "num_layers": 12, "num_heads": 16, "d_kv": 64},
    ),
    "convnext": Job("timm", "convnext_base", 128, "images"),
    "dit": Job("diffusers", "DiTTransformer2DModel", 64, "latents"),
    "qwen3": Job(
        "transformers",
        "Qwen3",
        8,
        "words",
        more=_wide(1024, 28, intermediate_size=3072, num_key_value_heads=8, head_dim=128),
    ),
    "regnet": Job("torchvision", "regnet_y_8gf", 128, "images", "ResBottleneckBlock"),
    "swin_v2": Job("torchvision", "swin_v2_s", 64, "images", "SwinTransformerBlockV2"),
    "densenet": Job("torchvision", "densenet201", 128, "images"),
    "mixer": Job("timm", "mixer_b16_224", 128, "images"),
    "opt": Job(
        "transformers",
        "OPT",
        8,
        "words",
        more=_wide(1024, 24, ffn_dim=4096, word_embed_proj_dim=1024),
    ),
    "autoencoder": Job("diffusers", "AutoencoderKL", 8, "pictures"),
    "maxvit": Job("timm", "maxvit_base_tf_224", 64, "images"),
    "coatnet": Job("timm", "coatnet_2_rw_224", 128, "images"),
    "beit": Job("timm", "beitv2_large_patch16_224", 128, "images"),
    "davit": Job("timm", "davit_base", 128, "images"),
    "hiera": Job("timm", "hiera_base_224", 128, "images"),
    "xcit": Job("timm", "xcit_medium_24_p16_224", 128, "images"),
    "wide_resnet": Job("torchvision", "wide_resnet101_2", 256, "images", "Bottleneck"),
    "gemma2": Job(
        "transformers",
        "Gemma2",
        8,
        "words",
        more=_wide(1024, 24, intermediate_size=6912, num_key_value_heads=4, head_dim=64),
    ),
    "gpt_neox": Job(
        "transformers", "GPTNeoX", 8, "words", more=_wide(2048, 16, intermediate_size=8192)
    ),
    "bloom": Job("transformers", "Bloom", 8, "words", more={**_wide(1024, 24), "n_head": 16}),
    "deberta": Job(
        "transformers", "DebertaV2", 16, "words512", more=_wide(1024, 24, intermediate_size=4096)
    ),
    "nfnet": Job("timm", "dm_nfnet_f1", 128, "images"),
    "sd_unet": Job("diffusers", "UNet2DConditionModel", 16, "captions"),
    "mixtral": Job(
        "transformers",
        "Mixtral",
        8,
        "words",
        more=_wide(1024, 16, intermediate_size=3584, num_key_value_heads=4),
    ),
    "whisper": Job(
        "transformers",
        "Whisper",
        16,
        "sounds",
        more={
            **{f"{part}_layers": 12 for part in ("encoder", "decoder")},
            **{f"{part}_attention_heads": 12 for part in ("encoder", "decoder")},
            **{f"{part}_ffn_dim": 3072 for part in ("encoder", "decoder")},
            "d_model": 768,
        },
    ),
    "flux": Job("diffusers", "FluxTransformer2DModel", 16, "patches"),
    "eva02": Job("timm", "eva02_base_patch14_224", 128, "images", more={"num_classes": 1000}),
    "wav2vec2": Job("transformers", "Wav2Vec2", 32, "speech"),
    "m2m100": Job("transformers", "M2M100", 16, "words512", more={"use_cache": False}),
    "clip": Job("transformers", "CLIP", 256, "pairs", more={"vision_config": {"patch_size": 16}}),
    "videomae": Job("transformers", "VideoMAE", 32, "videos"),
    "segformer": Job(
        "transformers",
        "Segformer",
        32,
        "scenes",
        more={
            "depths": [3, 4, 18, 3],
            "hidden_sizes": [64, 128, 320, 512],
            "decoder_hidden_size": 768,
        },
    ),
    "sd3": Job("diffusers", "SD3Transformer2DModel", 32, "prompts"),
    "lora": Job("peft", "Llama", 8, "words", more=_wide(2048, 16, intermediate_size=8192)),
    "llava": Job("transformers", "Llava", 8, "words_and_images"),
    "modernbert": Job("transformers", "ModernBert", 64, "words512", more={"pad_token_id": 0}),
    "conformer": Job(
        "transformers", "Wav2Vec2Conformer", 16, "speech", more=_wide(768, 16, vocab_size=32)
    ),
    "sam": Job("transformers", "SamVision", 8, "large_images"),
    "ltx": Job("diffusers", "LTXVideoTransformer3DModel", 4, "clips_and_prompts"),
    "hrnet": Job("timm", "hrnet_w32", 128, "images", "BasicBlock,Bottleneck"),
    "mobilenet": Job("timm", "mobilenetv4_conv_large", 256, "images"),
    "mvit": Job("torchvision", "video.mvit_v2_s", 16, "clips", "MultiscaleBlock"),
    "r3d": Job("torchvision", "video.r3d_18", 32, "clips", "BasicBlock"),
    "maskrcnn": Job(
        "torchvision", "detection.maskrcnn_resnet50_fpn_v2", 8, "objects", "Bottleneck"
    ),
    "raft": Job("torchvision", "optical_flow.raft_large", 8, "frames", "ResidualBlock,UpdateBlock"),
}
HEADS = {
    "Bert": "BertForMaskedLM",
    "DebertaV2": "DebertaV2ForMaskedLM",
    "T5": "T5ForConditionalGeneration",
    "GPT2": "GPT2LMHeadModel",
    "Whisper": "WhisperForConditionalGeneration",
    "Wav2Vec2": "Wav2Vec2ForCTC",
    "M2M100": "M2M100ForConditionalGeneration",
    "CLIP": "CLIPModel",
    "VideoMAE": "VideoMAEForPreTraining",
    "Segformer": "SegformerForSemanticSegmentation",
    "Llava": "LlavaForConditionalGeneration",
    "ModernBert": "ModernBertForMaskedLM",
    "Wav2Vec2Conformer": "Wav2Vec2ConformerForCTC",
    "SamVision": "SamVisionModel",
}
LAYERS = ("n_layer", "num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers")
WORDS = 32000
LENGTH = 1024
"""Of a text, if its job says nothing else."""
CAPTION = 768
"""The width of the captions of images, of 77 tokens each."""
CLASSES = 150
"""Of each pixel of a scene."""
IMAGE = 336
"""The width of an image beside a text, of 576 patches."""


def language(job: Job, small: bool) -> Any:
    import transformers

    more = dict(job.more)
    if job.feed in ("words", "words512", "sounds"):
        more["vocab_size"] = WORDS
    if small:
        more |= {k: 2 for k in LAYERS if k in more}
    if job.name == "T5":
        more |= {"decoder_start_token_id": 0, "use_cache": False}
    if job.name == "Whisper":
        more |= {f"{which}_token_id": 0 for which in ("pad", "bos", "eos", "decoder_start")}
    if job.name == "Segformer":
        more["num_labels"] = CLASSES
    if job.name == "Llava":
        parts = 2 if small else 16
        text = _wide(2048, parts, intermediate_size=8192, vocab_size=WORDS + 1)
        more = {"text_config": text, "image_token_index": WORDS}
        sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
        more["vision_config"] = {**sizes, "num_hidden_layers": 3 if small else 24, "patch_size": 14}
        more["vision_config"]["image_size"] = IMAGE
    config = getattr(transformers, f"{job.name}Config")(**more)
    head = HEADS.get(job.name, f"{job.name}ForCausalLM")
    model = getattr(transformers, head)(config)
    if job.name == "Llava":
        model.model.vision_tower.requires_grad_(False)
    return model


def adapters(job: Job, small: bool, checkpoint: bool) -> Any:
    """A language model that is frozen but for low-rank adapters of its linear layers."""
    import peft

    model = language(job, small)
    if checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    wanted = peft.LoraConfig(r=16, lora_dropout=0.05, target_modules="all-linear")
    return peft.get_peft_model(model, wanted)


def diffusion(job: Job, small: bool) -> Any:
    """Sizes as published: DDPM's U-Net, DiT-XL/2, the autoencoder and the U-Net of Stable
    Diffusion, but for narrower captions in the transformer of Stable Diffusion 3. FLUX's
    transformer has a third of its layers, half as wide."""
    import diffusers

    make = getattr(diffusers, job.name)
    if job.name == "UNet2DModel":
        widths: tuple[int, ...] = (32, 64) if small else (128, 128, 256, 256, 512, 512)
        downs = ["DownBlock2D"] * len(widths)
        ups = ["UpBlock2D"] * len(widths)
        downs[-2], ups[1] = "AttnDownBlock2D", "AttnUpBlock2D"
        return make(
            sample_size=128,
            block_out_channels=widths,
            down_block_types=tuple(downs),
            up_block_types=tuple(ups),
        )
    if job.name == "AutoencoderKL":
        widths = (32, 64) if small else (128, 256, 512, 512)
        return make(
            block_out_channels=widths,
            layers_per_block=2,
            latent_channels=4,
            down_block_types=("DownEncoderBlock2D",) * len(widths),
            up_block_types=("UpDecoderBlock2D",) * len(widths),
        )
    if job.name == "FluxTransformer2DModel":
        layers = {"num_layers": 2 if small else 6, "num_single_layers": 2 if small else 12}
        return make(num_attention_heads=12, joint_attention_dim=CAPTION, **layers)
    if job.name == "UNet2DConditionModel":
        widths = (32, 32, 32, 32) if small else (320, 640, 1280, 1280)
        return make(block_out_channels=widths, cross_attention_dim=CAPTION)
    if job.name == "SD3Transformer2DModel":
        return make(joint_attention_dim=CAPTION, num_layers=2 if small else 18)
    if job.name == "LTXVideoTransformer3DModel":
        sizes = {"num_attention_heads": 16, "cross_attention_dim": 1024}
        return make(num_layers=2 if small else 28, **sizes)
    return make(num_layers=2) if small else make()


def checkpointed_blocks(model: Any, classes: list[str]) -> None:
    """Each block of these classes by `torch.utils.checkpoint`, as a user would write it."""
    from torch.utils.checkpoint import checkpoint

    for block in [m for m in model.modules() if type(m).__name__ in classes]:
        block.forward = (
            lambda *a, _inner=block.forward, **k: checkpoint(_inner, *a, use_reentrant=False, **k)
        )  # fmt: skip


def model_of(job: Job, small: bool, checkpoint: bool) -> Any:
    if job.library == "gpt":
        from gpt import Gpt

        sizes = (2, 128) if small else (48, 1600)
        model = Gpt(*sizes, LENGTH, **job.more)
        model.checkpointing = checkpoint
    elif job.library == "transformers":
        model = language(job, small)
    elif job.library == "diffusers":
        model = diffusion(job, small)
    elif job.library == "peft":
        model = adapters(job, small, checkpoint)
    elif job.library == "timm":
        model = importlib.import_module("timm").create_model(job.name, **job.more)
    else:
        make = operator.attrgetter(job.name)(importlib.import_module("torchvision").models)
        own = checkpoint and job.name.startswith("densenet")
        whole = {"weights_backbone": None} if job.feed == "objects" else {}
        model = make(memory_efficient=True) if own else make(**whole)
    model.train()
    if not checkpoint:
        return model
    if job.blocks:
        checkpointed_blocks(model, job.blocks.split(","))
    elif job.library == "timm":
        model.set_grad_checkpointing()
    elif job.library == "diffusers":
        model.enable_gradient_checkpointing()
    elif job.library == "transformers":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def losses_of(job: Job, model: Any, batch: int, device: Any) -> Callable[[], Any]:
    """A function that gives the loss of one fresh random batch."""
    import torch
    from torch.nn import functional

    def images() -> Any:
        x = torch.randn(batch, 3, 224, 224, device=device)
        return functional.cross_entropy(model(x), torch.randint(0, 1000, (batch,), device=device))

    def tokens() -> Any:
        rows, targets = torch.randint(0, WORDS, (2, batch, LENGTH), device=device)
        return functional.cross_entropy(model(rows).flatten(0, -2), targets.flatten())

    def words() -> Any:
        length = 512 if job.feed == "words512" else LENGTH
        rows = torch.randint(1, WORDS, (batch, length), device=device)
        return model(input_ids=rows, labels=rows).loss

    def noise() -> Any:
        x = torch.randn(batch, 3, 128, 128, device=device)
        times = torch.randint(0, 1000, (batch,), device=device)
        return functional.mse_loss(model(x, times).sample, torch.randn_like(x))

    def latents() -> Any:
        x = torch.randn(batch, 4, 32, 32, device=device)
        times, classes = torch.randint(0, 1000, (2, batch), device=device)
        found = model(x, timestep=times, class_labels=classes).sample
        return functional.mse_loss(found[:, :4], torch.randn_like(x))

    def captions() -> Any:
        x = torch.randn(batch, 4, 64, 64, device=device)
        times = torch.randint(0, 1000, (batch,), device=device)
        words = torch.randn(batch, 77, CAPTION, device=device)
        return functional.mse_loss(model(x, times, words).sample, torch.randn_like(x))

    def sounds() -> Any:
        x = torch.randn(batch, 80, 3000, device=device)
        return model(x, labels=torch.randint(1, WORDS, (batch, 448), device=device)).loss

    def patches() -> Any:
        x = torch.randn(batch, 1024, 64, device=device)
        words = torch.randn(batch, 128, CAPTION, device=device)
        pooled, times = torch.randn(batch, 768, device=device), torch.rand(batch, device=device)
        places = torch.zeros(1024, 3, device=device), torch.zeros(128, 3, device=device)
        found = model(x, words, pooled, times, *places).sample
        return functional.mse_loss(found, torch.randn_like(x))

    def speech() -> Any:
        x = torch.randn(batch, 160_000, device=device)
        return model(x, labels=torch.randint(1, 32, (batch, 100), device=device)).loss

    def pairs() -> Any:
        rows = torch.randint(3, WORDS, (batch, 77), device=device)
        x = torch.randn(batch, 3, 224, 224, device=device)
        return model(input_ids=rows, pixel_values=x, return_loss=True).loss

    def videos() -> Any:
        x = torch.randn(batch, 16, 3, 224, 224, device=device)
        masked = torch.rand(8 * 196, device=device).argsort() < 1411
        return model(x, bool_masked_pos=masked.expand(batch, -1)).loss

    def scenes() -> Any:
        x = torch.randn(batch, 3, 512, 512, device=device)
        labels = torch.randint(0, CLASSES, (batch, 512, 512), device=device)
        return model(x, labels=labels).loss

    def prompts() -> Any:
        x = torch.randn(batch, 16, 64, 64, device=device)
        words = torch.randn(batch, 154, CAPTION, device=device)
        pooled, times = torch.randn(batch, 2048, device=device), torch.rand(batch, device=device)
        return functional.mse_loss(model(x, words, pooled, times).sample, torch.randn_like(x))

    def words_and_images() -> Any:
        rows = torch.randint(1, WORDS, (batch, 1024), device=device)
        rows[:, : (IMAGE // 14) ** 2] = WORDS
        x = torch.randn(batch, 3, IMAGE, IMAGE, device=device)
        return model(input_ids=rows, pixel_values=x, labels=rows % WORDS).loss

    def large_images() -> Any:
        found = model(torch.randn(batch, 3, 1024, 1024, device=device)).last_hidden_state
        return functional.mse_loss(found, torch.randn_like(found))

    def clips_and_prompts() -> Any:
        x = torch.randn(batch, 4 * 16 * 24, 128, device=device)
        words = torch.randn(batch, 128, 4096, device=device)
        times = torch.randint(0, 1000, (batch,), device=device)
        seen = torch.ones(batch, 128, device=device)
        found = model(x, words, times, seen, num_frames=4, height=16, width=24).sample
        return functional.mse_loss(found, torch.randn_like(x))

    def clips() -> Any:
        x = torch.randn(batch, 3, 16, 224, 224, device=device)
        return functional.cross_entropy(model(x), torch.randint(0, 400, (batch,), device=device))

    def objects() -> Any:
        images, targets = [], []
        for _ in range(batch):
            images.append(torch.rand(3, 640, 800, device=device))
            corners = torch.rand(12, 2, device=device) * 400
            boxes = torch.cat([corners, corners + 20 + torch.rand(12, 2, device=device) * 180], 1)
            masks = torch.randint(0, 2, (12, 640, 800), dtype=torch.uint8, device=device)
            labels = torch.randint(1, 91, (12,), device=device)
            targets.append({"boxes": boxes, "labels": labels, "masks": masks})
        return sum(model(images, targets).values())

    def frames() -> Any:
        first, second = torch.rand(2, batch, 3, 368, 496, device=device) * 2 - 1
        flow = torch.randn(batch, 2, 368, 496, device=device)
        return sum((found - flow).abs().mean() for found in model(first, second))

    def pictures() -> Any:
        x = torch.randn(batch, 3, 128, 128, device=device)
        return functional.mse_loss(model(x, sample_posterior=True).sample, x)

    feeds = {
        "images": images,
        "noise": noise,
        "latents": latents,
        "pictures": pictures,
        "tokens": tokens,
        "captions": captions,
        "sounds": sounds,
        "patches": patches,
        "speech": speech,
        "pairs": pairs,
        "videos": videos,
        "scenes": scenes,
        "prompts": prompts,
        "words_and_images": words_and_images,
        "large_images": large_images,
        "clips_and_prompts": clips_and_prompts,
        "clips": clips,
        "objects": objects,
        "frames": frames,
    }
    return feeds.get(job.feed, words)


# The training script -----------------------------------------------------------------------------


def train(args: argparse.Namespace) -> None:
    """For each line of standard input one turn: so many iterations, of which the last are timed.
    Answers with a line of JSON."""
    import torch

    job = JOBS[args.model]
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    torch.manual_seed(0)
    with device:
        model = model_of(job, not cuda, args.checkpoint).to(device)  # some have parts elsewhere
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    loss_of = losses_of(job, model, job.batch if cuda else SMALL_BATCH, device)

    def step() -> Any:
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for line in sys.stdin:
        began_s = time.monotonic()
        for number in range(int(line)):
            loss = step()
            if number % 10 == 0 or args.wait:
                loss.item()
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        last_s = time.perf_counter()
        for _ in range(TIMED):  # the host may be ahead of the device: only the whole is timed
            step()
        if cuda:
            torch.cuda.synchronize()
        running_s = (time.perf_counter() - last_s) / TIMED
        waiting_s = []
        for _ in range(TIMED):
            last_s = time.perf_counter()
            loss = step().item()
            if cuda:
                torch.cuda.synchronize()
            waiting_s.append(time.perf_counter() - last_s)
        found = {
            "loss": loss,
            "running_s": running_s,
            "waiting_s": statistics.median(waiting_s),
            "peak_bytes": torch.cuda.max_memory_allocated() if cuda else 0,
            "all_s": time.monotonic() - began_s,
        }
        if cuda:  # another arm's process is to have what this one only keeps for later
            torch.cuda.empty_cache()
        print(json.dumps(found), file=sys.__stdout__, flush=True)


# The arms ----------------------------------------------------------------------------------------


class Arm:
    """A process that trains one model, in turns."""

    def __init__(self, model: str, name: str, budget: str, args: argparse.Namespace) -> None:
        self.model, self.name, self.budget, self._limit_s = model, name, budget, args.timeout
        self._out = args.out / f"{model}-{name.replace('%', '')}"
        self._out.mkdir(parents=True)
        command = [sys.executable]
        if budget:
            command += ["-m", "kilter", "run", "--memory-budget", budget]
            command += ["--history", "off", "--out", str(self._out / "run")]
            command += ["--recompute", RECOMPUTE.get(name, "auto")]
            command += ["--gradients", "consume"] * name.endswith(CONSUME)
        command += [str(Path(__file__).resolve()), "--role", "train", "--model", model]
        command += ["--checkpoint"] * (name == "checkpoint") + ["--wait"] * args.wait
        self._errors = (self._out / "stderr").open("w+")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        self.turns: list[dict[str, Any]] = []

    def turn(self, iterations: int) -> bool:
        """Train so many iterations, and time some more. `False` if the process failed, or took too
        long and was ended."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        ends = threading.Timer(self._limit_s, process.terminate)
        ends.start()
        try:
            print(iterations, file=process.stdin, flush=True)
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        ends.cancel()
        if line:
            self.turns.append(json.loads(line))
        return bool(line)

    def end(self) -> dict[str, Any]:
        """What is kept of it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            code = self._process.wait(self._limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._errors.seek(0)
        report = self._out / "run" / "report.json"
        return {
            "model": self.model,
            "arm": self.name,
            "budget": self.budget,
            "exit_code": code,
            "stderr": [line[:240] for line in self._errors.read().splitlines()[-14:]],
            "turns": self.turns,
            "memory": json.loads(report.read_bytes())["memory"] if report.exists() else None,
        }

    def median(self, what: str) -> float:
        """Over its turns."""
        return float(statistics.median(turn[what] for turn in self.turns))


def line_of(arm: Arm, beside: Arm, row: dict[str, Any]) -> str:
    """One arm for people: the exit code of one that failed, else peak and times beside another's,
    turn by turn."""
    start = f"{arm.model:13} {arm.name:10}"
    if not arm.turns or row["exit_code"]:
        return f"{start} exit code {row['exit_code']}: {' | '.join(row['stderr'][-4:])}"
    times = []
    for what in ("running_s", "waiting_s"):
        pairs = zip(arm.turns, beside.turns, strict=False)  # the last turn may have failed
        ratios = sorted(a[what] / b[what] for a, b in pairs)
        ratio = f"{statistics.median(ratios):.3f}, {ratios[0]:.3f} to {ratios[-1]:.3f}"
        times.append(f"{what[:-2]} {arm.median(what) * 1e3:7.1f} ms ({ratio})")
    share = arm.median("peak_bytes") / max(1, beside.median("peak_bytes"))
    peak = f"{arm.median('peak_bytes') / 2**30:6.2f} GiB ({share:.3f})"
    took_s = sum(turn["all_s"] for turn in arm.turns)
    line = f"{start} {peak}  {'  '.join(times)}  in all {took_s:.0f} s"
    chosen = (row["memory"] or {}).get("recompute_choice", "")
    return f"{line}\n    {chosen}" if chosen else line


def compare(model: str, args: argparse.Namespace, device: threading.Lock, end_s: float) -> None:
    """The arms of one model, each printed and written as soon as it is there."""
    beside: dict[str, Arm] = {}

    def done(arm: Arm) -> None:
        pair = beside.get("checkpoint" if arm.name in RECOMPUTE else "plain", arm)
        row = {**arm.end(), "beside": pair.turns}
        with (args.out / "memory_libraries.jsonl").open("a") as file:
            print(json.dumps(row), file=file)
        print(line_of(arm, pair, row), flush=True)

    for name in args.arms.split(","):
        if time.monotonic() > end_s:
            print(f"{model:13} {name:10} not begun: the time of --limit-s is over", flush=True)
            break
        of_plain = name not in ARMS
        other = beside.get("plain" if of_plain else "checkpoint")
        budget = name.removesuffix(CONSUME) if of_plain else ""
        if name in RECOMPUTE:
            if other is None:
                continue  # its budget is not known
            budget = f"{int(other.median('peak_bytes')) // 2**20}MiB"
        arm = Arm(model, name, budget, args)
        with device:
            chooses = CHOOSING * (of_plain or name == "auto")
            first = args.steps + chooses if budget else WARM
            if arm.turn(first) and budget and other is not None:
                arm.turns.clear()
                other.turns.clear()
                for _ in range(args.rounds):
                    if not (other.turn(AGAIN) and arm.turn(AGAIN)):
                        break
        if arm.turns and name in ("plain", "checkpoint"):
            beside[name] = arm
        else:
            done(arm)
    for arm in beside.values():
        done(arm)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--models", default=",".join(JOBS))
    parser.add_argument(
        "--arms", default=",".join(ARMS), help="in this order; also shares: 75%%, 75%%+consume"
    )
    parser.add_argument("--steps", type=int, default=24, help="iterations before the timed ones")
    parser.add_argument("--rounds", type=int, default=5, help="of turns with checkpoint's")
    parser.add_argument("--timeout", type=int, default=150, help="seconds for one turn")
    parser.add_argument("--limit-s", type=float, default=1e9, help="no arm begins after it")
    parser.add_argument(
        "--at-once",
        type=int,
        default=1,
        help="models; one process trains, others are imported and built, which may disturb it",
    )
    parser.add_argument(
        "--wait",
        action="store_true",
        help="wait in every iteration before the timed ones as well: what an arm measures and "
        "chooses there is for a loop that waits",
    )
    parser.add_argument("--role", choices=("all", "train"), default="all", help=argparse.SUPPRESS)
    parser.add_argument("--model", choices=tuple(JOBS), help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out = args.out.absolute()
    if args.role == "train":
        train(args)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    unknown = set(args.models.split(",")) - set(JOBS)
    if unknown:
        parser.error(f"no such model: {', '.join(sorted(unknown))}; there are {', '.join(JOBS)}")
    arms = [name.removesuffix(CONSUME) for name in args.arms.split(",") if name not in ARMS]
    if wrong := [name for name in arms if not (name[-1:] == "%" and name[:-1].isdecimal())]:
        parser.error(f"no such arm: {', '.join(wrong)}; there are {', '.join(ARMS)}, and shares")
    end_s = time.monotonic() + args.limit_s
    with ThreadPoolExecutor(args.at_once) as pool:
        device = threading.Lock()
        list(pool.map(lambda model: compare(model, args, device, end_s), args.models.split(",")))


if __name__ == "__main__":
    main()
