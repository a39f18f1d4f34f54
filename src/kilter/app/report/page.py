"""A self-contained page: inline style, no script, nothing fetched from anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import resources

from kilter.app.report.svg import escape
from kilter.core.label import Label


def document(title: str, body: str) -> str:
    """The whole page; its security policy forbids scripts and requests."""
    style = resources.files("kilter.app.report").joinpath("report.css").read_text(encoding="utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{style}</style></head>\n<body><main>\n{body}"
        "\n</main></body></html>\n"
    )


def section(title: str, *parts: str, key: str = "") -> str:
    """A part of a page: its heading, and HTML below that."""
    named = f" id='{key}'" if key else ""
    return f"<section{named}><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def table(columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[str]], caption: str) -> str:
    """`columns` are heads and classes (`n` is a number); the cells are HTML."""
    heads = "".join(f"<th scope='col' class='{style}'>{escape(h)}</th>" for h, style in columns)
    body = "".join(
        "<tr>"
        + "".join(
            f"<td class='{style}'>{cell}</td>"
            for (_, style), cell in zip(columns, row, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return (
        f"<div class='scroll' tabindex='0'><table><caption>{escape(caption)}</caption>"
        f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def tag(label: Label) -> str:
    """Where the numbers beside it come from."""
    return f"<span class='tag {label.value}'>{label.value}</span>"


def tile(label: Label, name: str, value: str, spread: str, text: str, drawing: str = "") -> str:
    """One number that a reader in a hurry takes away, and what belongs to it."""
    return (
        f"<div class='tile'><h2>{escape(name)}</h2>"
        f"<p class='value'>{escape(value)} {tag(label)}</p>"
        f"<p class='spread'>{escape(spread)}</p>{drawing}<p>{escape(text)}</p></div>"
    )


def definitions(named: Iterable[tuple[str, str]]) -> str:
    """Names with texts, one below the other."""
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in named)
    return f"<dl>{items}</dl>"
