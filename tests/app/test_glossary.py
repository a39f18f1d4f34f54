"""The glossary: every word of a summary that needs it is explained, on the page and in the docs."""

from __future__ import annotations

from pathlib import Path

from kilter.app.report import glossary

DOCS = Path(__file__).parents[2] / "docs" / "glossary.md"


def test_words_are_found_as_they_stand_in_sentences() -> None:
    text = "passes: 18 passes, 9 under a plan; 3 deviations, 0 late, 18 on demand [simulated]"
    assert list(glossary.used(text)) == ["deviations", "late", "on demand", "pass", "simulated"]
    assert glossary.used("compass, plate, related") == {}
    assert list(glossary.used("compute-bound")) == ["compute-bound"]


def test_the_docs_say_the_same() -> None:
    docs = DOCS.read_text(encoding="utf-8")
    for word, meaning in glossary.WORDS.items():
        assert f"| {word} | {meaning} |" in docs
