"""Whether the GPU that is watched is the one that the program computes on."""

from __future__ import annotations

import sys

from kilter.core.setting import DeviceInfo
from kilter.observe import torch_internals


def why_not_this_gpu(info: DeviceInfo, uuid: str | None) -> str | None:
    """Which GPU the program uses was guessed before it began; by now torch knows (`uuid`; None: not
    from the iterations). If that is another one, or none, ours may be somebody else's: nothing is
    set on it."""
    if info.backend != "nvml":
        return None
    watched = info.uuid
    used = gpus_in_use() if uuid is None else [uuid]
    if any(uuid.lower() in watched.lower() for uuid in used):
        return None
    if not used:
        return f"the program computes on no GPU, and {watched} may be somebody else's"
    return (
        f"the program computes on {', '.join(f'GPU-{uuid}' for uuid in used)}, and {watched} "
        "is watched: let it see its own GPU alone, with CUDA_VISIBLE_DEVICES"
    )


def gpus_in_use() -> list[str]:
    """UUIDs of the GPUs that torch has a context on in this process; none is made here."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return []
    gpus = range(torch.cuda.device_count())
    used = [gpu for gpu in gpus if torch_internals.cuda_has_context(gpu)]
    return [str(torch.cuda.get_device_properties(gpu).uuid) for gpu in used]
