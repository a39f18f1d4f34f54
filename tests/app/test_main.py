"""What holds for every verb: how output files are refused, and how Ctrl-C ends it."""

import signal

import pytest
from tests.observe.traces import job, write
from torch.distributed.elastic.multiprocessing.api import SignalException

from kilter.app.cli import learn
from kilter.app.cli.main import main
from kilter.connect import launch

COMMANDS = (
    "report latest --html",
    "report latest --trace",
    "sections rank0.json --html",
    "plan clocks trace.json --device sim:v100 -o",
    "plan memory trace.json --memory-budget 1GiB --chrome",
    "learn table.csv --out",
    "share rehearse p1 --html",
    "bench operations --html",
    "bench branches --out",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_that_is_missing_is_said_before_the_work(tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    *words, option = command.split()
    for name, why in {"typo/found": f"no folder {tmp_path}/typo", ".": "is a folder"}.items():
        with pytest.raises(SystemExit) as ended:
            main([*words, option, name])
        out, err = capsys.readouterr()
        assert (ended.value.code, out) == (2, "")
        assert f"argument {option}: " in err
        assert why in err
    assert list(tmp_path.iterdir()) == []


def test_devices_and_files_in_the_folder_are_written_to(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    trace = str(write(tmp_path / "rank0.json", job(0)))
    for name in ("page.html", "/dev/null"):
        assert main(["sections", trace, "--html", name]) == 0
    assert (tmp_path / "page.html").stat().st_size > 0
    capsys.readouterr()


def test_ctrl_c_on_a_shared_job_is_one_line_and_the_exit_code_of_a_shell(monkeypatch, capsys):
    def interrupted(*arguments):
        raise SignalException("Process 1 got signal: 2", sigval=signal.SIGINT)

    monkeypatch.setattr(launch, "run_torchrun", interrupted)
    assert launch.run_shared(None, (), {}) == 130
    assert capsys.readouterr() == ("", "kilter share run: ended by SIGINT\n")


def test_ctrl_c_is_one_line_and_the_exit_code_of_a_shell(monkeypatch, capsys):
    def interrupted(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(learn, "load_tables", interrupted)
    assert main(["learn", "table.csv"]) == 130
    assert capsys.readouterr() == ("", "\nkilter learn: ended by Ctrl-C\n")
