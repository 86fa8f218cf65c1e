"""House: the imports between modules, and the picture of the layers in docs/design.md.

`python -m tests.house` updates the picture.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "pipeshard"
PAGE = ROOT / "docs" / "design.md"
# From the bottom to the top. Entries of the same row may not import each other.
LAYERS = (
    ("errors", "garbage", "hf", "private", "replaced", "script"),
    ("ghost", "options"),
    ("schedule", "batch"),
    ("distributed",),
    ("graph",),
    ("slices",),
    ("split",),
    ("config",),
    ("engine",),
    ("checkpoint", "planner", "data"),
    ("verify", "generate"),
    ("boost", "compat", "dataloader"),
    ("plugin",),
    ("entry", "interop", "layers", "elastic", "launch", "trainer"),
    ("commands", "trial", "recipe", "notebook"),
    ("dry_run", "recipe_data"),
    ("tuning",),
    ("cli",),
)
MARK = "<!-- layers -->\n```text\n"
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


@cache
def modules() -> dict[str, Path]:
    """The modules of the package, except __init__.py files, by their name without `pipeshard.`."""
    files = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
    return {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in files}


def imports(path: Path) -> Iterator[str]:
    """Yield the package's modules that a file imports, including imports in functions and for annotations."""
    known = modules()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "pipeshard":
            base = (node.module or "").removeprefix("pipeshard").lstrip(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}".lstrip(".")
                yield inner if inner in known else base
        elif isinstance(node, ast.Import):
            yield from (alias.name.removeprefix("pipeshard.") for alias in node.names if "pipeshard." in alias.name)


@cache
def graph() -> dict[str, set[str]]:
    known = modules()
    return {name: {other for other in imports(path) if other in known} - {name} for name, path in known.items()}


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """The modules in import cycles, or on a path between cycles. They remain after modules that import no remaining
    module, or that no remaining module imports, have been removed repeatedly."""
    left = set(edges)
    while gone := {
        name for name in left if not edges[name] & left or not any(name in edges[other] for other in left - {name})
    }:
        left -= gone
    return [sorted(left)] if left else []


def picture() -> str:
    """For each folder and module, the highest layer first: its name and purpose, and what it imports."""
    edges = graph()
    rows = []
    for names in reversed(LAYERS):
        for name in names:
            inside = [module for module in edges if module.split(".")[0] == name]
            if not inside:
                continue
            path = PACKAGE / name / "__init__.py" if (PACKAGE / name).is_dir() else PACKAGE / f"{name}.py"
            noun = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0].partition(": ")[2]
            below = {other.split(".")[0] for module in inside for other in edges[module]} - {name, "errors"}
            under = ", ".join(sorted(below, key=lambda other: (-LEVEL[other], other)))
            title = f"{name}/ ({len(inside)})" if path.name == "__init__.py" else name
            rows.append(f"{title:<17} {noun}\n{'':<17} -> {under}" if under else f"{title:<17} {noun}")
    return "\n".join(rows)


def with_picture(text: str) -> str:
    """The text of the page with the current picture."""
    start, end = text.index(MARK) + len(MARK), text.index("```", text.index(MARK) + len(MARK))
    return f"{text[:start]}{picture()}\n{text[end:]}"


if __name__ == "__main__":
    PAGE.write_text(with_picture(PAGE.read_text()))
