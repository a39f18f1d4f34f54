"""Models with parallel branches, random weights: what `kilter bench branches` and the tests run.

The encoder is that of CSWinTT (Song et al., "Transformer Tracking with Cyclic Shifting Window
Attention", CVPR 2022), written anew: eight heads whose windows differ, in a serial loop, as
published. The others have the shapes of well-known networks, so that nothing is tuned to one model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

MAPS = (8, 8, 24)
"""These are the sides of template 1, template 2 and search map, in the order of their tokens."""
TOKENS = sum(side * side for side in MAPS)
WINDOWS = (1, 2, 4, 8, 1, 2, 4, 8)
WIDTH, HEADS, HIDDEN, LAYERS = 256, 8, 2048, 6
HEAD = WIDTH // HEADS


def shift_of(head: int) -> int:
    """The last four heads shift their windows by half a window, on the search map only."""
    window = WINDOWS[head]
    return window // 2 if head >= HEADS // 2 else 0


def window_table(window: int, shift: int) -> Tensor:
    """Token of each (window, slot): L x n."""
    tables, base = [], 0
    for number, side in enumerate(MAPS):
        s = shift if number == len(MAPS) - 1 else 0
        tokens = base + torch.arange(side * side).reshape(side, side).roll((-s, -s), (0, 1))
        cells = tokens.reshape(side // window, window, side // window, window)
        tables.append(cells.permute(0, 2, 1, 3).reshape(-1, window * window))
        base += side * side
    return torch.cat(tables)


def cyclic_table(window: int, shift: int) -> Tensor:
    """Token of each (key column, slot): every window rolled inside itself by each (i, j)."""
    windows = window_table(window, shift).reshape(-1, window, window)
    rolled = [windows.roll((i, j), (1, 2)) for i in range(window) for j in range(window)]
    return torch.stack(rolled, dim=1).reshape(TOKENS, window * window)


def cyclic_weight(window: int) -> Tensor:
    """g(i, j) = u_i u_j - 1, flattened: what a cyclic shift by (i, j) costs."""
    part = torch.arange(window) / window
    u = torch.where(part > 0.5, part, 1 - part)
    return (u[:, None] * u[None, :] - 1).reshape(-1)


def relative_index(window: int) -> Tensor:
    """Where in the bias table of this window each (query window, key column) looks: L x 704."""
    r = torch.arange(TOKENS // window**2)[:, None]
    c = torch.arange(TOKENS)[None, :]
    apart = (r // window - c // window + TOKENS // window - 1) * (2 * window - 1)
    return apart + (r % window - c % window + window - 1)


def bias_size(window: int) -> int:
    return int(relative_index(window).max()) + 1


class WindowHead(nn.Module):  # type: ignore[misc]
    """One head of cyclic shifting window attention, map by map, as one would write it first."""

    def __init__(self, window: int, shift: int, *, host_tables: bool) -> None:
        super().__init__()
        self.window, self.shift = window, shift
        w = window
        i, j, a, b = torch.meshgrid(*(torch.arange(w) for _ in range(4)), indexing="ij")
        rows = ((a - i) % w).reshape(w * w, w, w)
        columns = ((b - j) % w).reshape(w * w, w, w)
        if host_tables:  # as published: they stay on the host when the module moves
            self.rows, self.columns = rows, columns
        else:
            self.register_buffer("rows", rows, persistent=False)
            self.register_buffer("columns", columns, persistent=False)
        self.register_buffer("weight", cyclic_weight(w), persistent=False)

    def partition(self, x: Tensor, shift: int) -> Tensor:
        """(704, c) -> (windows, w, w, c)."""
        w, parts, base = self.window, [], 0
        for number, side in enumerate(MAPS):
            part = x[base : base + side * side].reshape(side, side, -1)
            if shift and number == len(MAPS) - 1:
                part = part.roll((-shift, -shift), (0, 1))
            cells = part.reshape(side // w, w, side // w, w, -1).permute(0, 2, 1, 3, 4)
            parts.append(cells.reshape(-1, w, w, x.shape[-1]))
            base += side * side
        return torch.cat(parts)

    def merge(self, x: Tensor) -> Tensor:
        """(windows, w, w, c) -> (704, c): the inverse of `partition`."""
        w, parts, base = self.window, [], 0
        for number, side in enumerate(MAPS):
            count = (side // w) ** 2
            cells = x[base : base + count].reshape(side // w, side // w, w, w, -1)
            part = cells.permute(0, 2, 1, 3, 4).reshape(side, side, -1)
            if self.shift and number == len(MAPS) - 1:
                part = part.roll((self.shift, self.shift), (0, 1))
            parts.append(part.reshape(side * side, -1))
            base += count
        return torch.cat(parts)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """q, k, v (704, 32), mask (704) True where padded, bias (L, 704) -> (704, 32)."""
        n = self.window**2
        if n > 1:
            q = self.partition(q, self.shift)
            # (windows, (i, j), w, w, c): each window in all its cyclic shifts
            k = self.partition(k, self.shift)[:, self.rows, self.columns]
            v = self.partition(v, self.shift)[:, self.rows, self.columns]
        windows = TOKENS // n
        queries, keys = q.reshape(windows, -1), k.reshape(TOKENS, -1)
        scores = torch.matmul(queries, keys.transpose(0, 1))
        if n > 1:
            scores = (scores + self.weight.repeat(windows).to(scores.dtype)) / n
        if mask is not None:
            if n > 1:
                padded = self.partition(mask.unsqueeze(-1), 0).reshape(windows, n).all(-1)
                mask = padded.unsqueeze(-1).repeat(1, n).reshape(-1)
            scores = scores.masked_fill(mask.unsqueeze(0), float("-inf"))
        if bias is not None:
            scores = scores + bias
        found = torch.matmul(F.softmax(scores, dim=-1), v.reshape(TOKENS, -1))
        if n == 1:
            return found
        return self.merge(found.reshape(windows, self.window, self.window, HEAD))


class EncoderLayer(nn.Module):  # type: ignore[misc]
    def __init__(self, *, host_tables: bool) -> None:
        super().__init__()
        self.heads = nn.ModuleList(
            WindowHead(w, shift_of(i), host_tables=host_tables) for i, w in enumerate(WINDOWS)
        )
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None, biases: Sequence[Tensor | None]) -> Tensor:
        q, k, v = (part.squeeze(1) for part in self.project(x).chunk(3, dim=-1))
        q = q * HEAD**-0.5
        parts = zip(
            self.heads, q.chunk(HEADS, -1), k.chunk(HEADS, -1), v.chunk(HEADS, -1), strict=True
        )
        found = [head(q_, k_, v_, mask, biases[i]) for i, (head, q_, k_, v_) in enumerate(parts)]
        x = self.norm1(x + self.out(torch.cat(found, dim=-1).unsqueeze(1)))
        return self.norm2(x + self.narrow(F.relu(self.widen(x))))


class Encoder(nn.Module):  # type: ignore[misc]
    """Six layers over 704 tokens, batch 1. `host_tables`: index meshes on the host (trap 1 of the
    published code). `rebuild`: relative positions computed on the host in every call (trap 2)."""

    def __init__(
        self, *, layers: int = LAYERS, host_tables: bool = False, rebuild: bool = False
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(host_tables=host_tables) for _ in range(layers))
        self.tables = nn.ParameterDict(
            {str(w): nn.Parameter(torch.empty(bias_size(w))) for w in (1, 2, 4)}
        )
        self.rebuild = rebuild
        if not rebuild:
            for w in (1, 2, 4):
                self.register_buffer(f"relative{w}", relative_index(w), persistent=False)
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.xavier_uniform_(weight)
        for table in self.tables.values():
            nn.init.trunc_normal_(table, std=0.02)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x (704, 1, 256), mask (704) -> (704, 1, 256)."""
        of_window: dict[int, Tensor] = {}
        for w in (1, 2, 4):
            at = relative_index(w) if self.rebuild else getattr(self, f"relative{w}")
            of_window[w] = self.tables[str(w)][at]
        biases = [of_window.get(w) for w in WINDOWS]
        for layer in self.layers:
            x = layer(x, mask, biases)
        return x


def padding_mask() -> Tensor:
    """The bottom nine rows of the search map are padding."""
    mask = torch.zeros(TOKENS, dtype=torch.bool)
    mask[-9 * MAPS[-1] :] = True
    return mask


# --- other shapes of branches ---------------------------------------------------------------------


def conv(into: int, out: int, kernel: int, *, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(into, out, kernel, stride, kernel // 2, bias=False),
        nn.BatchNorm2d(out),
        nn.ReLU(),
    )


class Inception(nn.Module):  # type: ignore[misc]
    """One block of GoogLeNet (Szegedy et al., 2015): four towers over one map."""

    def __init__(self, into: int, a: int, b: tuple[int, int], c: tuple[int, int], d: int) -> None:
        super().__init__()
        self.a = conv(into, a, 1)
        self.b = nn.Sequential(conv(into, b[0], 1), conv(b[0], b[1], 3))
        self.c = nn.Sequential(conv(into, c[0], 1), conv(c[0], c[1], 5))
        self.d = nn.Sequential(nn.MaxPool2d(3, 1, 1), conv(into, d, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.a(x), self.b(x), self.c(x), self.d(x)], dim=1)


def inception() -> nn.Module:
    """Blocks 4a to 5b of GoogLeNet on 14 x 14 and 7 x 7 maps."""
    return nn.Sequential(
        Inception(480, 192, (96, 208), (16, 48), 64),
        Inception(512, 160, (112, 224), (24, 64), 64),
        Inception(512, 128, (128, 256), (24, 64), 64),
        Inception(512, 112, (144, 288), (32, 64), 64),
        Inception(528, 256, (160, 320), (32, 128), 128),
        nn.MaxPool2d(2),
        Inception(832, 256, (160, 320), (32, 128), 128),
    )


def experts() -> list[nn.Module]:
    """Eight feed-forward experts of unequal size, all asked about one token."""
    sizes = (256, 512, 1024, 1024, 2048, 2048, 4096, 8192)
    return [
        nn.Sequential(nn.LayerNorm(1024), nn.Linear(1024, s), nn.GELU(), nn.Linear(s, 1024))
        for s in sizes
    ]


class _Block(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(width, width, 3), conv(width, width, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class _Patches(nn.Module):  # type: ignore[misc]
    """A small vision transformer."""

    def __init__(self, width: int = 192, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, 8, 8)
        self.norm = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(depth))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        batch, tokens, width = x.shape
        for i, (qkv, out, mlp) in enumerate(zip(self.qkv, self.out, self.mlp, strict=True)):
            q, k, v = qkv(self.norm[2 * i](x)).reshape(batch, tokens, 3, 3, -1).unbind(2)
            scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
            found = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
            x = x + out(found.reshape(batch, tokens, width))
            x = x + mlp(self.norm[2 * i + 1](x))
        return self.head(x.mean(1))


def ensemble() -> list[nn.Module]:
    """Four different small networks asked about one image."""
    residual = nn.Sequential(conv(3, 48, 3, stride=2), *(_Block(48) for _ in range(6)))
    return [
        nn.Sequential(residual, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10)),
        nn.Sequential(
            *(conv(a, b, 3, stride=2) for a, b in ((3, 32), (32, 64), (64, 128), (128, 256))),
            nn.Flatten(),
            nn.Linear(256 * 16, 10),
        ),
        _Patches(),
        nn.Sequential(
            nn.AvgPool2d(2),
            nn.Flatten(),
            *(layer for _ in range(4) for layer in (nn.LazyLinear(512), nn.GELU())),
            nn.LazyLinear(10),
        ),
    ]


def detection() -> list[nn.Module]:
    """Detection heads on four scales: class and box stacks over maps of 64, 32, 16 and 8."""

    class Scale(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.classes = nn.Sequential(*(conv(128, 128, 3) for _ in range(3)))
            self.boxes = nn.Sequential(*(conv(128, 128, 3) for _ in range(3)))
            self.to_class, self.to_box = nn.Conv2d(128, 80, 1), nn.Conv2d(128, 4, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.to_class(self.classes(x)), self.to_box(self.boxes(x))

    return [Scale() for _ in range(4)]


class _Bottleneck(nn.Module):  # type: ignore[misc]
    def __init__(self, into: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            conv(into, width, 1),
            conv(width, width, 3, stride=stride),
            nn.Conv2d(width, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.skip: nn.Module = nn.Identity()
        if into != out or stride != 1:
            self.skip = nn.Sequential(
                nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.skip(x))


class TrackerFrame(nn.Module):  # type: ignore[misc]
    """One frame of the tracker on the device: backbone, encoder, decoder, corner and score heads.
    The templates' features are cached, as published; box and score stay on the device."""

    def __init__(self, *, host_tables: bool = False, rebuild: bool = False) -> None:
        super().__init__()
        layers: list[nn.Module] = [conv(3, 64, 7, stride=2), nn.MaxPool2d(3, 2, 1)]
        into = 64
        for width, depth, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2)):
            for number in range(depth):
                layers.append(_Bottleneck(into, width, stride if number == 0 else 1))
                into = 4 * width
        self.backbone = nn.Sequential(*layers, nn.Conv2d(into, WIDTH, 1))
        self.encoder = Encoder(host_tables=host_tables, rebuild=rebuild)
        self.query = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.attend = nn.ModuleList(
            nn.MultiheadAttention(WIDTH, HEADS, dropout=0.0) for _ in range(LAYERS)
        )
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))
            for _ in range(LAYERS)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2 * LAYERS + 1))
        widths = (256, 256, 128, 64, 32)
        self.corners = nn.ModuleList(
            nn.Sequential(
                *(conv(a, b, 3) for a, b in pairwise(widths)),
                nn.Conv2d(32, 1, 1),
            )
            for _ in range(2)
        )
        self.score = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(),
            nn.Linear(WIDTH, 1),
        )  # fmt: skip
        grid = torch.arange(MAPS[-1], dtype=torch.float32).repeat(MAPS[-1], 1)
        self.register_buffer("grid", grid.reshape(-1), persistent=False)

    def forward(self, image: Tensor, templates: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """image (1, 3, 384, 384), templates (128, 1, 256), mask (704) -> box (4), score (1)."""
        search = self.backbone(image).flatten(2).permute(2, 0, 1)
        memory = self.encoder(torch.cat([templates, search]), mask)
        x = torch.zeros_like(self.query)
        for i, (attend, mlp) in enumerate(zip(self.attend, self.mlp, strict=True)):
            found, _ = attend(
                x + self.query, memory, memory, key_padding_mask=mask[None], need_weights=False
            )
            x = self.norms[2 * i](x + found)
            x = self.norms[2 * i + 1](x + mlp(x))
        x = self.norms[-1](x)
        side = MAPS[-1]
        features = memory[-side * side :, 0]
        alike = features @ x[0, 0]
        map_ = (features * alike[:, None]).transpose(0, 1).reshape(1, WIDTH, side, side)
        box = []
        for corner in self.corners:
            heat = corner(map_).reshape(-1).softmax(-1)
            across = self.grid.reshape(side, side).transpose(0, 1).reshape(-1)
            box += [(heat * self.grid).sum(), (heat * across).sum()]
        return torch.stack(box), self.score(x[0, 0])


# --- what a benchmark runs ------------------------------------------------------------------------


@dataclass(frozen=True)
class BranchWorkload:
    """`build` makes the module or the list of branches, `inputs` its arguments."""

    name: str
    about: str
    build: Callable[[], Any]
    inputs: Callable[[torch.Generator], tuple[Any, ...]]
    published: Callable[[], Any] | None = None
    """It builds the same with the host traps of the published code, where there is one."""


def _image(*shape: int) -> Callable[[torch.Generator], tuple[Any, ...]]:
    return lambda generator: (torch.randn(*shape, generator=generator),)


def _frame(generator: torch.Generator) -> tuple[Any, ...]:
    image = torch.randn(1, 3, 384, 384, generator=generator)
    return image, torch.randn(128, 1, WIDTH, generator=generator), padding_mask()


def _scales(generator: torch.Generator) -> tuple[Any, ...]:
    return tuple(torch.randn(1, 128, s, s, generator=generator) for s in (64, 32, 16, 8))


WORKLOADS: dict[str, BranchWorkload] = {
    w.name: w
    for w in (
        BranchWorkload(
            "cswintt",
            "CSWinTT encoder: 6 layers of 8 heads with windows 1, 2, 4, 8; bottom rows padded",
            Encoder,
            lambda g: (torch.randn(TOKENS, 1, WIDTH, generator=g), padding_mask()),
            lambda: Encoder(host_tables=True, rebuild=True),
        ),
        BranchWorkload(
            "cswintt-nomask",
            "the same without a mask",
            Encoder,
            lambda g: (torch.randn(TOKENS, 1, WIDTH, generator=g),),
            lambda: Encoder(host_tables=True, rebuild=True),
        ),
        BranchWorkload(
            "frame",
            "whole tracker frame: ResNet-50 to layer 3, encoder, decoder, corner and score heads",
            TrackerFrame,
            _frame,
            lambda: TrackerFrame(host_tables=True, rebuild=True),
        ),
        BranchWorkload("inception", "GoogLeNet blocks 4a-5b", inception, _image(1, 480, 14, 14)),
        BranchWorkload("experts", "8 unequal experts, one token", experts, _image(1, 1024)),
        BranchWorkload("ensemble", "4 different small networks", ensemble, _image(1, 3, 64, 64)),
        BranchWorkload("detection", "detection heads on 4 scales", detection, _scales),
    )
}


def build(
    workload: BranchWorkload,
    *,
    device: str,
    dtype: torch.dtype,
    published: bool = False,
    seed: int = 0,
) -> tuple[Any, tuple[Any, ...]]:
    """Module (or list of branches) and inputs, in evaluation mode, the same for the same seed."""
    make = workload.published if published and workload.published else workload.build
    # The networks draw their weights from the global generator; leave it as it was found.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = make()
        inputs = workload.inputs(torch.Generator().manual_seed(seed + 1))
        parts = made if isinstance(made, list) else [made]
        with torch.no_grad():
            for number, part in enumerate(parts):
                if any(isinstance(m, nn.LazyLinear) for m in part.modules()):
                    part(*(inputs if len(inputs) == 1 else (inputs[number],)))
                part.eval().to(device=device, dtype=dtype)

    def place(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return x.to(device=device, dtype=dtype if x.is_floating_point() else None)

    return made, tuple(place(x) for x in inputs)
