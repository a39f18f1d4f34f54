"""`kilter share run --ray`: placement, environment, output and ends, on a fake of Ray; and once on
a real one, where Ray is installed."""

import importlib.util
import os
import secrets
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from fake_ray import FakeRay

from kilter.app.cli.main import main
from kilter.connect.ray_launch import (
    RankPlace,
    RayJob,
    RayNode,
    bundles,
    environments,
    first_numbers,
    named_variables,
    ranks_in_order,
)
from kilter.connect.ray_rank import RankProcess, RankSite
from kilter.core.errors import FileError, NoDevice, UsageError

HERE = socket.gethostbyname("localhost")
WHOLE = {HERE: {"GPU": 2.0, "CPU": 8.0}}
SHARED = {HERE: {"kilter_gpu_0": 4.0, "kilter_gpu_1": 4.0, "CPU": 8.0}}


def site(folder, script="train.py", endpoint="none.json"):
    return RankSite(str(folder), script, str(folder / endpoint))


@pytest.fixture
def script(tmp_path):
    """Writes `train.py` and gives the command that runs it."""

    def write(text):
        (tmp_path / "train.py").write_text(text)
        return ("train.py",)

    write("")
    return write


def placed(ray, tmp_path, gpus=(0, 1)):
    return RayJob.placed(ray, gpus, site(tmp_path), timeout_s=0.0)


def test_whole_gpus_are_asked_for_unless_gpus_are_offered_for_sharing():
    nodes = [RayNode("10.0.0.10", {"GPU": 2.0}), RayNode("10.0.0.9", {"GPU": 4.0})]
    assert bundles(nodes, (0, 1, 2)) == [{"GPU": 1.0}] * 3
    offered = [
        RayNode("10.0.0.10", {"kilter_gpu_0": 4.0}),
        RayNode("10.0.0.9", {"kilter_gpu_0": 4.0, "kilter_gpu_1": 4.0}),
    ]
    # Addresses count as numbers: 10.0.0.9 has GPUs 0 and 1 of the daemon, 10.0.0.10 has GPU 2.
    assert first_numbers(offered) == {"10.0.0.9": 0, "10.0.0.10": 2}
    assert bundles(offered, (1, 2)) == [
        {"kilter_gpu_1": 1.0, "node:10.0.0.9": 0.001},
        {"kilter_gpu_0": 1.0, "node:10.0.0.10": 0.001},
    ]


@pytest.mark.parametrize(
    ("resources", "sentence"),
    [
        ({"GPU": 1.0}, "the Ray cluster has 1 GPU, and the job needs 2"),
        ({}, "the Ray cluster has 0 GPUs, and the job needs 2"),
        ({"kilter_gpu_0": 4.0}, "offers GPU 0 for sharing, and the daemon shares GPU 1 as well"),
    ],
)
def test_a_cluster_without_enough_gpus_is_refused_at_once(resources, sentence):
    with pytest.raises(NoDevice, match=sentence):
        bundles([RayNode("10.0.0.1", resources)], (0, 1))


places = st.lists(
    st.builds(
        lambda node, gpu: RankPlace(f"10.0.0.{node}", gpu, 8 * node + gpu),
        st.integers(8, 12),
        st.integers(0, 7),
    ),
    min_size=1,
    max_size=12,
    unique=True,
)


@given(found=places, own=st.integers(8, 13))
def test_each_rank_is_told_what_torchrun_would_tell_it(found, own):
    order = ranks_in_order(found, f"10.0.0.{own}")
    ordered = [found[i] for i in order]
    told = environments(ordered, 29500, "a1")
    assert sorted(order) == list(range(len(found)))
    assert [int(t["RANK"]) for t in told] == list(range(len(found)))
    assert {t["MASTER_ADDR"] for t in told} == {ordered[0].address}
    assert {t["MASTER_PORT"] for t in told} == {"29500"}
    if any(place.address == f"10.0.0.{own}" for place in found):
        assert ordered[0].address == f"10.0.0.{own}"
    for place, mine in zip(ordered, told, strict=True):
        there = [p for p in ordered if p.address == place.address]
        assert int(mine["LOCAL_WORLD_SIZE"]) == len(there)
        assert int(mine["WORLD_SIZE"]) == len(found)
        # As scripts use it: torch.cuda.set_device(LOCAL_RANK) is the GPU of this rank.
        visible = mine["CUDA_VISIBLE_DEVICES"].split(",")
        assert int(visible[int(mine["LOCAL_RANK"])]) == place.gpu
        assert len({t["GROUP_RANK"] for t, p in zip(told, ordered, strict=True) if p in there}) == 1
    assert {int(t["GROUP_WORLD_SIZE"]) for t in told} == {len({p.address for p in found})}


def test_variables_by_name_and_kilters_own_reach_the_ranks():
    here = {"HF_HOME": "/models", "KILTER_READ_ONLY": "1", "SECRET": "x"}
    found = named_variables(["HF_HOME", "SEED=3"], here)
    assert found == {"HF_HOME": "/models", "SEED": "3", "KILTER_READ_ONLY": "1"}
    with pytest.raises(UsageError, match="--env NONE: there is no such variable here"):
        named_variables(["NONE"], here)


@pytest.mark.parametrize("nodes", [WHOLE, SHARED], ids=["whole", "shared"])
def test_ranks_run_with_their_environment_and_output_is_handed_on(
    nodes, tmp_path, script, capfdbinary
):
    ray = FakeRay(nodes)
    job = placed(ray, tmp_path)
    assert job.gpus == (0, 1)
    assert [actor.options["num_gpus"] for actor in ray.actors] == (
        [1.0, 1.0] if nodes is WHOLE else [0, 0]
    )
    command = script(
        "import os, sys\n"
        "names = 'RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'CUDA_VISIBLE_DEVICES', 'SEED'\n"
        "sys.stdout.buffer.write(' '.join(map(os.environ.get, names)).encode() + b' \\xff\\n')\n"
        "sys.stderr.write(f'of rank {os.environ[\"RANK\"]}\\n')\n"
    )
    assert job.run(command, {"SEED": "3"}) == 0
    written = capfdbinary.readouterr()
    assert sorted(written.out.splitlines()) == [b"0 0 2 0,1 3 \xff", b"1 1 2 0,1 3 \xff"]
    assert sorted(written.err.splitlines()) == [b"of rank 0", b"of rank 1"]
    assert ray.given_back
    assert ray.ended


FAILS = "import os, sys, time\nif os.environ['RANK'] == '1': {act}\ntime.sleep(600)\n"


@pytest.mark.parametrize(
    ("act", "code"),
    [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137), ("raise ValueError('no data')", 1)],
)
def test_the_first_failing_rank_ends_the_job_with_its_code(tmp_path, script, act, code):
    ray = FakeRay(WHOLE)
    assert placed(ray, tmp_path).run(script(FAILS.format(act=act)), {}) == code
    assert all(actor.inner._process.returncode is not None for actor in ray.actors)
    assert ray.given_back


def test_a_lost_node_ends_the_job(tmp_path, script, capsys):
    ray = FakeRay(WHOLE, lost={1})
    assert placed(ray, tmp_path).run(script("import time\ntime.sleep(600)\n"), {}) == 1
    assert f"rank 1 is lost, with its node {HERE}" in capsys.readouterr().err
    assert ray.actors[0].inner._process.returncode == -signal.SIGTERM
    assert ray.given_back


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_stops_all_ranks(tmp_path, script, number):
    """The first rank sends it to the process that waits for the job: this one."""
    ray = FakeRay(WHOLE)
    text = (
        "import os, signal, time\n"
        f"if os.environ['RANK'] == '0': os.kill({os.getpid()}, {int(number)})\n"
        "time.sleep(600)\n"
    )
    before = signal.getsignal(signal.SIGTERM)
    assert placed(ray, tmp_path).run(script(text), {}) == 130
    assert all(actor.inner._process.returncode is not None for actor in ray.actors)
    assert ray.given_back
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_interrupt_as_the_ranks_start_stops_all(tmp_path, script, monkeypatch):
    ray = FakeRay(WHOLE)
    job = placed(ray, tmp_path)
    get = ray.get

    def interrupted(answers, timeout=None):
        get(answers, timeout)
        if isinstance(answers, list):
            raise KeyboardInterrupt

    monkeypatch.setattr(ray, "get", interrupted)
    assert job.run(script("import time\ntime.sleep(600)\n"), {}) == 130
    assert all(actor.inner._process.returncode is not None for actor in ray.actors)
    assert ray.given_back


def test_a_rank_that_was_stopped_does_not_start_any_more(tmp_path):
    rank = RankProcess()
    rank.look(site(tmp_path))
    rank.stop()
    rank.start(("-c", "import time; time.sleep(600)"), {})
    assert rank._process is None


def test_gpus_that_others_hold_are_not_waited_for_for_ever(tmp_path, script):
    ray = FakeRay(WHOLE, free={"GPU": 1.0})
    with pytest.raises(NoDevice, match=r"no room for 2 ranks within 0 s.*1 of GPU is free"):
        placed(ray, tmp_path)
    assert ray.given_back
    assert not ray.actors


def test_a_script_that_is_not_on_the_node_is_named(tmp_path):
    ray = FakeRay(WHOLE)
    with pytest.raises(FileError, match=rf"train.py: not on the node {HERE}; put it there"):
        placed(ray, tmp_path)
    assert ray.given_back


def test_gpus_beside_those_of_the_daemon_are_refused(tmp_path, script):
    with pytest.raises(NoDevice, match="Ray gives the job GPU 0, which the daemon does not share"):
        placed(FakeRay(WHOLE), tmp_path, gpus=(1, 2))


def test_a_daemon_out_of_reach_of_rank_0_is_told_of(tmp_path, script):
    (tmp_path / "open.json").write_text("{}")
    (tmp_path / "open.json").chmod(0o644)
    for file, why in [("none.json", "No such file"), ("open.json", "chmod 600")]:
        job = RayJob.placed(FakeRay(WHOLE), (0, 1), site(tmp_path, endpoint=file))
        assert why in job.unreached
        assert "start the daemon with --host ADDRESS" in job.unreached
        assert "readable by its owner only" in job.unreached


def test_without_ray_or_a_cluster_one_sentence_says_what_to_do(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["share", "run", "--ray", "train.py"]) == 1
    assert "pip install kilter[ray]" in capsys.readouterr().err

    def refuses(**options):
        raise ConnectionError("Could not find any running Ray instance.\nMore.")

    fake = FakeRay(WHOLE)
    fake.init = refuses
    for name in ("ray", "ray.util", "ray.util.scheduling_strategies"):
        monkeypatch.setitem(sys.modules, name, fake)
    assert main(["share", "run", "--ray", "train.py"]) == 1
    told = capsys.readouterr().err
    assert "no Ray cluster answers (Could not find any running Ray instance)" in told
    assert "ray start --head" in told
    assert main(["share", "run", "--env", "X=1", "train.py"]) == 2
    assert "--env: belongs to --ray" in capsys.readouterr().err


def test_kilter_does_not_import_ray():
    code = "import sys, kilter.app.cli.share, kilter.connect.ray_rank; print('ray' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"


TRAIN = """
import os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group("gloo")
data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step, (x, y) in enumerate(DataLoader(data, 4, sampler=DistributedSampler(data))):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    if len(sys.argv) > 1 and dist.get_rank() == 1 and step == 2:
        print("rank 1 fails", file=sys.stderr)
        sys.exit(7)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {step + 1} steps", flush=True)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A real Ray of this machine, and a daemon of two "GPUs". Gives the environment that leads
    to both."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install kilter[ray]")
    folder = tmp_path_factory.mktemp("ray")
    environment = {
        **os.environ,
        "XDG_RUNTIME_DIR": str(folder),
        "RAY_worker_niceness": "0",  # else its workers starve where the machine is busy
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",  # of this cluster alone
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    code = (
        "import ray, sys\n"
        "context = ray.init(num_cpus=2, num_gpus=0, include_dashboard=False,\n"
        "    resources={'kilter_gpu_0': 2, 'kilter_gpu_1': 2}, log_to_driver=False,\n"
        "    object_store_memory=80 * 2**20, logging_level='ERROR')\n"
        "print(context.address_info['gcs_address'], flush=True)\n"
        "sys.stdin.read()\n"
    )
    serve = [sys.executable, "-m", "kilter", "share", "serve", "--gpus", "0-1"]
    with (
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        ) as head,
        subprocess.Popen(serve, stderr=subprocess.PIPE, text=True, env=environment) as daemon,
    ):
        try:
            assert "GPUs 0, 1" in daemon.stderr.readline()
            yield {**environment, "RAY_ADDRESS": head.stdout.readline().strip()}
        finally:
            daemon.terminate()
            head.stdin.close()


def test_two_ranks_train_and_one_fails_on_a_real_ray(cluster, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)

    def run(*arguments):
        command = [sys.executable, "-m", "kilter", "share", "run", "--ray", "train.py", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=cluster, capture_output=True, text=True, timeout=900
        )

    trained = run()
    assert trained.returncode == 0, trained.stderr
    assert sorted(trained.stdout.splitlines()) == ["rank 0 of 2: 4 steps", "rank 1 of 2: 4 steps"]
    failed = run("fail")
    assert failed.returncode == 7, failed.stderr
    assert "rank 1 fails" in failed.stderr
    # The first job has given its units back: the second was placed on them.
