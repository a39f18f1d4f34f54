"""Models and training loops of other people, as they are, plain and under a memory budget.

    python benchmarks/memory_models.py --out DIR [--cases llama,t5] [--budget 60%] [--at-once 3]

Random weights, random data, deterministic kernels; each case is started as a user would start it
(`kilter run --memory-budget`). One JSON line each: peak, median iteration, and whether losses and
parameters equal the plain run's bit for bit. Times beside the libraries' own checkpointing are
measured by memory_libraries.py.

Needs transformers, accelerate, timm and lightning for the cases that name them. This file is also
the training script, which knows nothing of kilter. Without a GPU it runs tiny models, to test
this script.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

CASES = {
    "llama": "transformers Trainer, bf16, gradient clipping",
    "t5": "transformers Trainer, bf16, tied weights, dropout, accumulation over 2",
    "bert": "transformers model, own loop, fp16 with GradScaler",
    "vit": "timm model, own loop, bf16, learning rate schedule",
    "convnext": "timm model, own loop, bf16, channels last",
    "lightning": "Lightning Trainer, GPT-2, bf16-mixed, clipping",
}
TIMED = 6
"""Iterations at the end."""


class Timed:
    """Peak and times of the last iterations; an optimizer's step ends one."""

    def __init__(self, steps: int, cuda: bool) -> None:
        self.left, self.cuda = steps, cuda
        self.ends_s: list[float] = []

    def __call__(self, *_: Any) -> None:
        import torch

        self.left -= 1
        if self.left > TIMED:
            return
        if self.cuda:
            torch.cuda.synchronize()
            if self.left == TIMED:
                torch.cuda.reset_peak_memory_stats()
        self.ends_s.append(time.perf_counter())


def language(case: str, small: bool) -> Any:
    """A model of transformers."""
    import transformers as hf

    width, layers, words = (128, 2, 256) if small else (1024, 16, 32000)
    if case == "llama":
        return hf.LlamaForCausalLM(
            hf.LlamaConfig(
                hidden_size=width,
                intermediate_size=3 * width,
                num_hidden_layers=layers,
                num_attention_heads=width // 32,
                vocab_size=words,
                use_cache=False,
            )
        )
    if case == "t5":
        return hf.T5ForConditionalGeneration(
            hf.T5Config(
                d_model=width,
                d_ff=3 * width,
                num_layers=layers // 2,
                num_heads=width // 32,
                d_kv=32,
                vocab_size=words,
                decoder_start_token_id=0,
                use_cache=False,
            )
        )
    if case == "bert":
        return hf.BertForMaskedLM(
            hf.BertConfig(
                hidden_size=width,
                intermediate_size=4 * width,
                num_hidden_layers=layers,
                num_attention_heads=width // 32,
                vocab_size=words,
            )
        )
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(
            n_embd=width, n_layer=layers, n_head=width // 32, vocab_size=words, use_cache=False
        )
    )


def tokens(case: str, small: bool, count: int) -> list[dict[str, Any]]:
    """Samples, each a sequence with labels."""
    import torch

    length, words = (256, 256) if small else (512 if case == "t5" else 1024, 32000)
    if case == "bert":
        length = min(length, 512)
    rows = torch.randint(1, words, (count, length), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in rows]


def by_trainer(case: str, steps: int, batch: int, small: bool, out: Path) -> Any:
    import transformers as hf

    every = 2 if case == "t5" else 1
    model = language(case, small)
    rows = tokens(case, small, batch * steps * every)
    losses: list[float] = []

    class Keep(hf.TrainerCallback):  # type: ignore[misc,name-defined]
        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            losses.append(logs.get("loss", 0.0))

    trainer = hf.Trainer(
        model,
        hf.TrainingArguments(
            str(out / "trainer"),
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=every,
            max_steps=steps,
            bf16=True,
            optim="adamw_torch_fused",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=small,
        ),
        train_dataset=rows,
        callbacks=[Keep()],
    )
    trainer.train()
    return model, losses


def by_lightning(steps: int, batch: int, small: bool, out: Path) -> Any:
    import lightning
    import torch

    losses: list[str] = []

    class Job(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = language("gpt2", small)

        def training_step(self, rows: dict[str, Any], _: int) -> Any:
            loss = self.model(**rows).loss
            losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    job = Job()
    trainer = lightning.Trainer(
        max_steps=steps,
        precision="bf16-mixed",
        gradient_clip_val=1.0,
        accelerator="cpu" if small else "gpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=out,
    )
    data = torch.utils.data.DataLoader(tokens("gpt2", small, batch * steps), batch_size=batch)
    trainer.fit(job, data)
    return job, [loss.item() for loss in losses]


def by_hand(case: str, steps: int, batch: int, small: bool) -> Any:
    """A plain loop: a model of timm or transformers, half precision, a scaler or a schedule."""
    import torch

    device = torch.device("cpu" if small else "cuda")
    model: Any
    if case == "bert":
        model = language(case, small).to(device)
    else:
        import timm

        names = {"vit": "vit_base_patch16_224", "convnext": "convnext_base"}
        tiny = {"vit": "vit_tiny_patch16_224", "convnext": "convnext_atto"}
        model = timm.create_model((tiny if small else names)[case]).to(device)
        if case == "convnext":
            model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    half = torch.float16 if case == "bert" and not small else torch.bfloat16
    scaler = torch.amp.GradScaler(device.type, enabled=half is torch.float16)
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        with torch.autocast(device.type, half):
            if case == "bert":
                rows = tokens(case, small, batch)
                inputs = {k: torch.stack([row[k] for row in rows]).to(device) for k in rows[0]}
                loss = model(**inputs).loss
            else:
                images = torch.randn(batch, 3, 224, 224, device=device)
                classes = torch.randint(0, 1000, (batch,), device=device)
                loss = torch.nn.functional.cross_entropy(model(images), classes)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def train(args: argparse.Namespace) -> None:
    """Writes what it found to OUT/found.json."""
    import torch
    from gpt import digest
    from torch.optim.optimizer import register_optimizer_step_post_hook

    cuda = torch.cuda.is_available()
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    timed = Timed(args.steps, cuda)
    register_optimizer_step_post_hook(timed)
    small, case, steps = not cuda, args.case, args.steps
    batch = 8 if small else {"t5": 8, "bert": 32, "vit": 128, "convnext": 64}.get(case, 8)
    if case in ("llama", "t5"):
        model, losses = by_trainer(case, steps, batch, small, args.out)
    elif case == "lightning":
        model, losses = by_lightning(steps, batch, small, args.out)
    else:
        model, losses = by_hand(case, steps, batch, small)
    times = [b - a for a, b in zip(timed.ends_s, timed.ends_s[1:], strict=False)]
    found = {
        "digest": digest(model, losses),
        "losses": [losses[0], losses[-1]],
        "parameters": sum(p.numel() for p in model.parameters()),
        "iteration_s": statistics.median(times),
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else 0,
    }
    (args.out / "found.json").write_text(json.dumps(found))


def run(case: str, arm: str, args: argparse.Namespace) -> dict[str, Any]:
    out = args.out / f"{case}-{arm}"
    out.mkdir(parents=True)
    verb = ["-m", "kilter", "run", "--memory-budget", args.budget, "--history", "off"]
    verb += ["--out", str(out / "run")]
    job = [str(Path(__file__).resolve()), "--role", "train", "--case", case, "--out", str(out)]
    done = subprocess.run(
        [sys.executable, *(verb if arm == "governed" else []), *job, "--steps", str(args.steps)],
        capture_output=True,
        text=True,
        timeout=args.timeout,
        env={**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
    )
    found, report = out / "found.json", out / "run" / "report.json"
    return {
        "case": case,
        "arm": arm,
        "budget": args.budget if arm == "governed" else None,
        "rc": done.returncode,
        "stderr": [line[:200] for line in done.stderr.splitlines()[-14:]],
        **(json.loads(found.read_bytes()) if found.exists() else {}),
        "memory": json.loads(report.read_bytes())["memory"] if report.exists() else None,
    }


def compare(case: str, args: argparse.Namespace) -> list[str]:
    """Plain, then governed; lines for people."""
    found: dict[str, dict[str, Any]] = {}
    for arm in ("plain", "governed"):
        try:
            found[arm] = run(case, arm, args)
        except subprocess.TimeoutExpired:
            return [f"{case}: {arm} took over {args.timeout} s"]
    lines = []
    with open(args.out / "memory_models.jsonl", "a") as file:
        for arm, row in found.items():
            row["same"] = row.get("digest") == found["plain"].get("digest") is not None
            print(json.dumps(row), file=file)
            peak, took = row.get("peak_bytes", 0) / 2**30, row.get("iteration_s", 0) * 1e3
            lines.append(f"{case} {arm}: exit {row['rc']}, {peak:.2f} GiB, {took:.1f} ms")
            if row["rc"] or arm == "governed":
                lines += [f"   {line[:170]}" for line in row["stderr"] if "kilter" in line]
            if row["rc"]:
                lines += [f"   {line[:170]}" for line in row["stderr"][-3:]]
    same = "the same bits" if found["governed"]["same"] else "DIFFERENT"
    return [*lines, f"{case}: {same} ({CASES[case]})"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--role", choices=("all", "train"), default="all")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--case", default="llama")
    parser.add_argument("--budget", default="60%")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--timeout", type=float, default=120)
    parser.add_argument(
        "--at-once", type=int, default=1, help="cases; with more than one, times mean nothing"
    )
    args = parser.parse_args()
    args.out = args.out.absolute()
    if args.role == "train":
        train(args)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    cases = args.cases.split(",")
    with ThreadPoolExecutor(args.at_once) as pool:
        for lines in pool.map(lambda case: compare(case, args), cases):
            print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
