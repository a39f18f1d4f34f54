"""`kilter completion`: scripts that know every verb and option, because the parsers write them."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from kilter.app.cli.main import VERBS, main, parser_of


def printed(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_verb_and_option_is_in_the_script(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script = printed(shell, capsys)
    for verb in VERBS:
        assert verb in script
        for action in parser_of(verb)[0]._actions:
            for option in action.option_strings:
                name = option.lstrip("-")
                flag = "-l" if option.startswith("--") else "-s"
                assert (f"{flag} {name}" if shell == "fish" else option) in script


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_can_read_it(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = printed(shell, capsys)
    done = subprocess.run(
        [shell, "-n"], input=script, capture_output=True, text=True, timeout=900, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("kilter re", {"report", "rehearse", "restore"}),
        ("kilter run --memory", {"--memory-budget"}),
        ("kilter size --autocast ", {"bf16", "fp16", "off"}),
        ("kilter plan cl", {"clocks"}),
    ],
)
def test_bash_completes(line: str, expected: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = line.split(" ")
    ask = (
        f"COMP_WORDS=({' '.join(word or repr('') for word in words)}); COMP_CWORD={len(words) - 1}"
    )
    script = f'{printed("bash", capsys)}\n{ask}\n_kilter\nprintf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=900, check=True
    )
    assert set(done.stdout.split()) == expected
