"""Two ranks whose store stops answering before their scripts end: both end within 15 seconds."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch
from seen import batch, layers, show

EXPECT = {"exit codes": [0, 0], "ended in time": True}
IN_TIME_S = 15.0


def serve(port: int) -> None:
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    print("ready", flush=True)
    time.sleep(600)
    del store


def train() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = layers(3)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(25):
        model(batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    rank = dist.get_rank()
    Path(f"trained-{rank}").touch()
    while not Path("frozen").exists():
        time.sleep(0.01)
    Path(f"end-{rank}").write_text(str(time.monotonic()))


def main() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    host = subprocess.Popen(
        [sys.executable, __file__, "serve", str(port)], stdout=subprocess.PIPE, text=True
    )
    assert host.stdout is not None
    host.stdout.readline()
    common = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    options = ["--memory-budget", "60%", "--out", "out"]
    if "plain" in sys.argv:
        command = [sys.executable, __file__, "job"]
    else:
        command = [sys.executable, "-m", "kilter", "run", *options, __file__, "job"]
    ranks = [
        subprocess.Popen(command, env=os.environ | common | {"RANK": r, "LOCAL_RANK": r})
        for r in ("0", "1")
    ]
    while not all(Path(f"trained-{rank}").exists() for rank in (0, 1)):
        time.sleep(0.05)
        if any(rank.poll() is not None for rank in ranks):
            break
    host.send_signal(signal.SIGSTOP)
    Path("frozen").touch()
    codes: list[int | None] = []
    late = False
    for number, rank in enumerate(ranks):
        try:
            codes.append(rank.wait(90))
            end_s = time.monotonic()
        except subprocess.TimeoutExpired:
            rank.kill()
            codes.append(None)
            late = True
            continue
        late |= end_s - float(Path(f"end-{number}").read_text()) > IN_TIME_S
    host.kill()
    show(**{"exit codes": codes, "ended in time": not late})


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve", port]:
            serve(int(port))
        case ["job"]:
            train()
        case _:
            main()
