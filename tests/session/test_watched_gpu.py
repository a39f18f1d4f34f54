"""When the job of a watched GPU is over, by the driver's list of processes and real processes."""

import os
import subprocess
import sys

import pytest

from kilter.core.errors import NotSupported
from kilter.session.watched_gpu import ABSENT_LOOKS, Occupants, descends

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc of Linux")


@pytest.fixture
def sleeper():
    """A shell with a child."""
    shell = subprocess.Popen(
        ["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True
    )
    child = int(shell.stdout.readline())
    yield shell, child
    os.kill(child, 15)
    shell.kill()
    shell.communicate()


def test_children_belong_to_the_job(sleeper):
    shell, child = sleeper
    assert descends(child, {shell.pid})
    assert descends(child, {os.getpid()})
    assert not descends(os.getpid(), {child})
    assert not descends(999_999_999, {os.getpid()})
    here = [shell.pid]
    occupants = Occupants(lambda: here, None)
    assert occupants.why_over() is None
    here.append(child)
    assert occupants.why_over() is None
    here.append(os.getpid())
    assert f"process {os.getpid()} has come" in occupants.why_over()


def test_a_job_that_leaves_is_over_after_two_looks():
    here = [os.getpid()]
    occupants = Occupants(lambda: here, None)
    assert occupants.why_over() is None
    here.clear()
    for _ in range(ABSENT_LOOKS - 1):
        assert occupants.why_over() is None
    assert occupants.why_over() == "the job has left the GPU"


def test_an_empty_gpu_is_waited_for():
    occupants = Occupants(list, None)
    assert all(occupants.why_over() is None for _ in range(5))


def test_a_named_process_that_ends_is_over(sleeper):
    shell, child = sleeper
    occupants = Occupants(lambda: [shell.pid, child], shell.pid)
    assert occupants.why_over() is None
    shell.kill()
    shell.wait()
    assert occupants.why_over() == f"process {shell.pid} has ended"


def test_a_driver_that_does_not_tell_is_no_reason_to_stop():
    def refuse():
        raise NotSupported("no process list")

    assert Occupants(refuse, None).why_over() is None
    assert Occupants(refuse, os.getpid()).why_over() is None
