"""Builds small Kineto traces: kernels, launches, c10d operations and steps, in microseconds."""

import gzip
import json

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ALL_GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SEND_RECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


def kernel(name, begin, end, *, stream=7, cat="kernel", device=0, **args):
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": device,
        "tid": stream,
        "ts": begin,
        "dur": end - begin,
        "args": {"device": device, "stream": stream, **args},
    }


def launch(at, correlation):
    args = {"correlation": correlation}
    return {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": at, "args": args}


def step(number, begin, end, cat="user_annotation"):
    name = f"ProfilerStep#{number}"
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": end - begin}


def comms(external, **args):
    args = {"External id": external, **args}
    return {"ph": "X", "cat": "cpu_op", "name": "record_param_comms", "ts": 0, "args": args}


def trace(events, *, rank=0, world_size=1, groups=None, device="NVIDIA H200"):
    config = [
        {"pg_name": name, "pg_desc": description, "ranks": ranks}
        for name, description, ranks in groups or ()
    ]
    info = {"rank": rank, "world_size": world_size, "pg_count": len(config), "pg_config": config}
    return {
        "deviceProperties": [{"id": 0, "name": device}],
        "distributedInfo": info,
        "traceEvents": events,
        "traceName": "x",
    }


def write(path, content, *, indent=None):
    text = json.dumps(content, indent=indent)
    if path.name.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def job(rank, *, iterations=3, late_us=0.0, clock_us=0.0, world_size=2, seq=True, jitter=()):
    """Each iteration of 1000 us: 400 us of computation on stream 7, an all-reduce that ends at 900
    and of which the rank sees all behind its own arrival, 50 us of optimizer."""
    events = []
    for i in range(iterations):
        t = clock_us + 1e6 + 1000.0 * i
        shift = jitter[i] if jitter else 0.0
        events += [kernel(f"gemm_{k}", t + 50 * k, t + 50 * (k + 1)) for k in range(8)]
        number = {"Seq": i} if seq else {}
        message = {
            "Collective name": "allreduce",
            "In msg nelems": 1000,
            "Out msg nelems": 1000,
            "dtype": "Float",
            "Process Group Name": "0",
            **number,
        }
        begin = t + 400 + late_us
        events.append(kernel(ALL_REDUCE, begin, t + 900 + shift, stream=17, **message))
        events.append(kernel("adamw", t + 900 + shift, t + 950 + shift))
    groups = [("0", "default_pg", list(range(world_size)))]
    return trace(events, rank=rank, world_size=world_size, groups=groups)
