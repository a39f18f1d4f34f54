"""A lint step: no two public classes, and no two constants with different values, share a name.

One word has one meaning. A reader who meets `Outcome` in a traceback should not have to ask which
of three it is. `make lint` runs this; it prints each clash and exits with 1 if there is one.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "kilter"
SAME_EVERYWHERE = {"HELP", "EPILOG", "T", "Array"}
"""Names by which the command line finds a verb's texts, the usual type variable, NumPy arrays."""


def definitions(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Name and meaning of each public class and constant: a class means itself, so no two agree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name, f"class at line {node.lineno}"
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, ast.unparse(node.value)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            yield node.target.id, ast.unparse(node.value)


def clashes(source: Path) -> list[str]:
    """One sentence for each name that stands in several files with different meanings."""
    places: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for file in sorted(source.rglob("*.py")):
        if "harm_programs" in file.parts:  # scripts as users write them
            continue
        where = str(file.relative_to(source))
        for name, meaning in definitions(ast.parse(file.read_text(encoding="utf-8"))):
            is_type_or_constant = name[0].isupper() and not name.startswith("_")
            if is_type_or_constant and name not in SAME_EVERYWHERE:
                key = where + meaning if meaning.startswith("class at line") else meaning
                places[name].append((where, key))
    return [
        f"{name} has several meanings: {', '.join(where for where, _ in found)}"
        for name, found in sorted(places.items())
        if len({meaning for _, meaning in found}) > 1
    ]


def main() -> int:
    found = clashes(SOURCE)
    print("\n".join(found) or "names: each public class and constant has one meaning")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
