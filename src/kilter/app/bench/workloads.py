"""Iterations of known networks from the shapes of their layers: FLOPs and bytes, no GPU needed.

Every operation reads its inputs and writes its outputs once. A layer's backward pass computes the
gradients of its input and of its weights, each with the FLOPs of its forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from kilter.core.label import Label
from kilter.core.trace import IterationTrace, Kind, Operation


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """One layer's forward pass: numbers of elements, not bytes."""

    name: str
    flops: float
    inputs: float
    outputs: float
    weights: float = 0.0


def vgg16(batch: int) -> list[Layer]:
    """K. Simonyan and A. Zisserman 2015, configuration D, images of 224 x 224."""
    layers, channels, size = [], 3, 224
    for i, width in enumerate((64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0)):
        if not width:
            layers.append(_pointwise(f"pool{i}", batch * channels * size**2, 0.25))
            size //= 2
            continue
        layers += _convolution(f"conv{i}", batch, channels, width, 3, size, size, norm=False)
        channels = width
    for i in range(3):
        layers += _convolution(f"conv{14 + i}", batch, channels, 512, 3, size, size, norm=False)
    layers.append(_pointwise("pool17", batch * channels * size**2, 0.25))
    features = (512 * 7 * 7, 4096, 4096, 1000)
    for i in range(3):
        layers.append(linear(f"fc{i}", batch, features[i], features[i + 1]))
        layers.append(_pointwise(f"relu_fc{i}", batch * features[i + 1]))
    return layers


def resnet50(batch: int) -> list[Layer]:
    """K. He et al. 2016, images of 224 x 224."""
    layers = _convolution("stem", batch, 3, 64, 7, 224, 112)
    layers.append(_pointwise("pool", batch * 64 * 112**2, 0.25))
    channels, size = 64, 56
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512))):
        for block in range(blocks):
            name, after = f"stage{stage}.{block}", size
            if stage and not block:
                after = size // 2
            layers += _convolution(f"{name}.a", batch, channels, width, 1, size, size)
            layers += _convolution(f"{name}.b", batch, width, width, 3, size, after)
            layers += _convolution(f"{name}.c", batch, width, 4 * width, 1, after, after)
            if not block:
                layers += _convolution(f"{name}.down", batch, channels, 4 * width, 1, size, after)
            layers.append(_pointwise(f"{name}.add", batch * 4 * width * after**2, inputs=2.0))
            channels, size = 4 * width, after
    layers.append(_pointwise("mean", batch * channels * size**2, 1 / size**2))
    return [*layers, linear("fc", batch, channels, 1000)]


def gpt(blocks: int, width: int, heads: int, tokens: int, context: int) -> list[Layer]:
    """A decoder-only transformer with `tokens` in the batch, in sequences of `context`."""
    layers = [_pointwise("embedding", tokens * width)]
    scores = tokens * context * heads
    for i in range(blocks):
        attend = 2.0 * tokens * context * width
        layers += [
            _pointwise(f"block{i}.norm1", tokens * width),
            linear(f"block{i}.qkv", tokens, width, 3 * width),
            Layer(
                name=f"block{i}.scores", flops=attend, inputs=2.0 * tokens * width, outputs=scores
            ),
            _pointwise(f"block{i}.softmax", scores),
            Layer(
                name=f"block{i}.values",
                flops=attend,
                inputs=scores + tokens * width,
                outputs=tokens * width,
            ),
            linear(f"block{i}.projection", tokens, width, width),
            _pointwise(f"block{i}.add1", tokens * width, inputs=2.0),
            _pointwise(f"block{i}.norm2", tokens * width),
            linear(f"block{i}.up", tokens, width, 4 * width),
            _pointwise(f"block{i}.gelu", 4.0 * tokens * width),
            linear(f"block{i}.down", tokens, 4 * width, width),
            _pointwise(f"block{i}.add2", tokens * width, inputs=2.0),
        ]
    vocabulary = 50257
    layers.append(linear("head", tokens, width, vocabulary))
    return [*layers, _pointwise("loss", float(tokens * vocabulary))]


def linear(name: str, rows: int, inputs: int, outputs: int) -> Layer:
    """A matrix product with weights."""
    return Layer(
        name=name,
        flops=2.0 * rows * inputs * outputs,
        inputs=float(rows * inputs),
        outputs=float(rows * outputs),
        weights=float(inputs * outputs),
    )


def _convolution(
    name: str,
    batch: int,
    channels: int,
    width: int,
    kernel: int,
    before: int,
    after: int,
    *,
    norm: bool = True,
) -> list[Layer]:
    """A convolution with what follows it: batch normalisation (or a bias) and ReLU."""
    outputs = float(batch * width * after**2)
    weights = float(channels * width * kernel**2)
    layers = [
        Layer(
            name=name,
            flops=2.0 * batch * after**2 * weights,
            inputs=float(batch * channels * before**2),
            outputs=outputs,
            weights=weights,
        )
    ]
    # The statistics are a pass over the data of their own.
    layers += [_pointwise(f"{name}.norm", outputs, inputs=2.0)] if norm else []
    return [*layers, _pointwise(f"{name}.relu", outputs)]


def _pointwise(name: str, elements: float, shrink: float = 1.0, *, inputs: float = 1.0) -> Layer:
    return Layer(
        name=name, flops=2.0 * elements, inputs=inputs * elements, outputs=shrink * elements
    )


OPERATION_WORKLOADS: dict[str, Callable[[], list[Layer]]] = {
    "resnet50": lambda: resnet50(64),
    "vgg16": lambda: vgg16(64),
    "gpt": lambda: gpt(24, 2048, 16, 2048, 2048),
}
"""Their batches fit 12 GiB, or would with the parameters offloaded; the GPT is GPT-3-XL's size."""


def iteration(layers: Sequence[Layer], *, element_bytes: int, training: bool) -> IterationTrace:
    """The operations in order: forward, then (in training) backward and the optimizer's step.

    Their times are left to the device: on a host's timeline FLOPs and bytes alone count.
    """
    operations = [*_forward(layers, element_bytes)]
    if training:
        operations += _backward(layers, element_bytes)
    return IterationTrace(
        iteration_s=0.0,
        operations=tuple(operations),
        timeline="host",
        device="",
        label=Label.SIMULATED,
        source="from the shapes of the layers",
    )


def _forward(layers: Sequence[Layer], element_bytes: int) -> Iterator[Operation]:
    for layer in layers:
        moved = layer.inputs + layer.outputs + layer.weights
        yield _operation(layer.name, Kind.FORWARD, layer.flops, moved * element_bytes)


def _backward(layers: Sequence[Layer], element_bytes: int) -> Iterator[Operation]:
    for layer in reversed(layers):
        gradients = layer.inputs + layer.outputs
        if layer.weights:
            moved = (gradients + layer.weights) * element_bytes
            yield _operation(f"{layer.name}.dx", Kind.BACKWARD, layer.flops, moved)
            yield _operation(f"{layer.name}.dw", Kind.BACKWARD, layer.flops, moved)
        else:
            moved = (gradients + layer.inputs) * element_bytes
            yield _operation(f"{layer.name}.dx", Kind.BACKWARD, layer.flops, moved)
    weights = sum(layer.weights for layer in layers)
    # Adam in float32: reads weight, gradient and two moments, writes weight and both moments.
    yield _operation("optimizer", Kind.OPTIMIZER, 12.0 * weights, 7 * 4.0 * weights)


def _operation(name: str, kind: Kind, flops: float, moved: float) -> Operation:
    return Operation(
        name=name, kind=kind, start_s=0.0, duration_s=0.0, flops=flops, bytes_moved=moved
    )
