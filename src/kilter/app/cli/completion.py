"""`kilter completion`: a script that completes this command line, made from the parsers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from kilter.app.cli.main import VERBS, parser_of

HELP = "Print a script that completes kilter's command line in bash, zsh or fish."

EPILOG = """\
examples:
  kilter completion bash >> ~/.bashrc
  kilter completion zsh > "${fpath[1]}/_kilter"
  kilter completion fish > ~/.config/fish/completions/kilter.fish
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """An option, or one of the words that may stand in a place of its own."""

    text: str
    help: str
    values: tuple[str, ...] | None = None
    """These may follow an option. Empty: anything may; None: nothing."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))


def run(arguments: argparse.Namespace) -> int:
    verbs = {verb: list(_words(parser_of(verb)[0])) for verb in VERBS}
    print({"bash": _bash, "zsh": _zsh, "fish": _fish}[arguments.shell](verbs))
    return 0


def _words(parser: argparse.ArgumentParser) -> Iterator[Word]:
    """What a verb's parser, and those of its parts, accept."""
    seen: set[str] = set()
    parsers, places = [parser], []
    for one in parsers:
        for action in one._actions:
            if isinstance(action, argparse._SubParsersAction):
                places += [Word(text=name, help="") for name in action.choices]
                parsers += action.choices.values()
                continue
            choices = tuple(str(choice) for choice in action.choices or ())
            if not action.option_strings:
                places += [Word(text=choice, help="") for choice in choices]
            values = None if action.nargs == 0 else choices
            told = (action.help or "").replace("%%", "%")
            for option in action.option_strings:
                if option not in seen:
                    seen.add(option)
                    yield Word(text=option, help=told, values=values)
    yield from places


def _bash(verbs: dict[str, list[Word]]) -> str:
    words, values = [], []
    for verb, known in verbs.items():
        words.append(f"    {verb}) words='{' '.join(word.text for word in known)}' ;;")
        values += [
            f"    '{verb} {word.text}') words='{' '.join(word.values)}' ;;"
            for word in known
            if word.values
        ]
    return "\n".join(
        [
            "_kilter() {",
            '  local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}" words=""',
            '  local verb="${COMP_WORDS[1]}"',
            f"  [ \"$COMP_CWORD\" -eq 1 ] && verb='' && words='{' '.join(verbs)}'",
            '  case "$verb" in',
            *words,
            "  esac",
            '  case "$verb $prev" in',
            *values,
            "  esac",
            '  COMPREPLY=($(compgen -W "$words" -- "$cur"))',
            "}",
            "complete -o default -F _kilter kilter",
        ]
    )


def _zsh(verbs: dict[str, list[Word]]) -> str:
    lines = ["#compdef kilter", "_kilter() {", "  local -a verbs places", "  verbs=("]
    lines += [f"    {_quoted(f'{verb}:{VERBS[verb]}')}" for verb in verbs]
    lines += [
        "  )",
        "  if (( CURRENT == 2 )); then _describe verb verbs; return; fi",
        "  local verb=$words[2]; shift words; (( CURRENT-- ))",
        "  case $verb in",
    ]
    for verb, known in verbs.items():
        places = " ".join(word.text for word in known if not word.text.startswith("-"))
        rest = f"*:word:({places})" if places else "*:file:_files"
        specs = [_zsh_option(word) for word in known if word.text.startswith("-")]
        lines.append(f"    {verb}) _arguments {' '.join([*specs, _quoted(rest)])} ;;")
    return "\n".join([*lines, "  esac", "}", "compdef _kilter kilter"])


def _zsh_option(word: Word) -> str:
    told = word.help.translate(str.maketrans("[]:", "();"))
    value = ""
    if word.values is not None:
        value = f":value:({' '.join(word.values)})" if word.values else ":value:_files"
    return _quoted(f"{word.text}[{told}]{value}")


def _fish(verbs: dict[str, list[Word]]) -> str:
    lines = []
    for verb, known in verbs.items():
        told = f"-d {_quoted(VERBS[verb])}"
        lines.append(f"complete -c kilter -f -n __fish_use_subcommand -a {verb} {told}")
        for word in known:
            line = f"complete -c kilter -n '__fish_seen_subcommand_from {verb}'"
            if not word.text.startswith("-"):
                lines.append(f"{line} -a {word.text}")
                continue
            name = word.text.lstrip("-")
            line += f" -l {name}" if word.text.startswith("--") else f" -s {name}"
            if word.values is not None:
                line += f" -x -a '{' '.join(word.values)}'" if word.values else " -r"
            lines.append(f"{line} -d {_quoted(word.help)}")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    """For any of the three shells: in single quotes, without single quotes and backslashes."""
    plain = text.replace("'", "`").replace("\\", "/")
    return f"'{plain}'"
