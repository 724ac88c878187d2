"""The site has the tree of the repository, so that links between its documents are the same here and there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ("docs/**/*.png", "docs/**/*.svg", "benchmarks/results/*.png")
SHOWN = ("*.md", "LICENSE", "docs/**/*.md", "benchmarks/results/*.md", *PICTURES)
LINKED = ("examples/*.py", "benchmarks/*.py", "clients/*.py")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of docs/ by those of the repository, under their paths there; README.md is the home page."""
    paths = sorted({path for pattern in (*SHOWN, *LINKED) for path in ROOT.glob(pattern)})
    kept = [file for file in files if not file.src_uri.endswith((".md", ".png", ".svg", ".py"))]
    return Files(
        [
            *kept,
            *(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)) for path in paths),
            File.generated(config, "docs/errors.md", content=errors_page()),
        ]
    )


def errors_page() -> str:
    """Return a table of all errors that the package raises, by their first words."""
    rows = set()
    for path in sorted((ROOT / "lightning_lowbw").rglob("*.py")):
        for error, message in raised(ast.parse(path.read_text())):
            shown = " ".join(message.split()).replace("|", "\\|").replace("`", "'")
            rows.add(f"| {shown} | `{error}` | `{path.relative_to(ROOT).as_posix()}` |")
    head = ["# Errors", "", "... is what was given.", "", "| message | type | raised in |", "| --- | --- | --- |"]
    return "\n".join([*head, *sorted(rows, key=str.lower)])


def raised(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the type and the message of each error whose message is written where it is raised."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            words = node.exc.args[0]
            parts = words.values if isinstance(words, ast.JoinedStr) else [words]
            texts = [part.value if isinstance(part, ast.Constant) else "..." for part in parts]
            if any(text != "..." for text in texts):
                yield ast.unparse(node.exc.func), "".join(map(str, texts))
