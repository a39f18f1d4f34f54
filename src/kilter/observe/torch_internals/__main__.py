"""Prints what the installed PyTorch does not have, as JSON.

`kilter doctor` runs it in a process of its own, which a broken PyTorch may take down.
"""

from __future__ import annotations

import msgspec

from kilter.observe import torch_internals

if __name__ == "__main__":
    print(msgspec.json.encode(torch_internals.missing()).decode())
