"""Count the structure of the product at two revisions: `python tests/structure.py BASE [NEW]`.

Print a table of code lines, modules, record types, and values that cross module borders as
`dict[str, Any]` or as bare tuples. NEW: a revision; if it is left out, the files on disk count.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tarfile
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PRODUCT = ("actors", "service", "deploy", "rayloom")
AREAS = (*PRODUCT, "tests", "benchmarks")
RECORD_BASES = {
    "NamedTuple": "NamedTuple",
    "TypedDict": "TypedDict",
    "Protocol": "Protocol",
    "BaseModel": "pydantic model",
    "Struct": "msgspec struct",
    **{name: "Enum" for name in ("Enum", "StrEnum", "IntEnum", "Flag", "IntFlag")},
}
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def files_of(revision: str | None) -> Iterator[tuple[str, str]]:
    """Yield the path and text of each Python file of a revision, or of the disk (if git has it)."""
    if revision is None:
        for name in _git("ls-files", *AREAS).decode().splitlines():
            if name.endswith(".py") and (path := REPOSITORY / name).exists():
                yield name, path.read_text(encoding="utf-8")
        return
    # An older revision lacks some of the areas.
    areas = set(_git("ls-tree", "--name-only", revision).decode().split()).intersection(AREAS)
    with tarfile.open(fileobj=io.BytesIO(_git("archive", revision, *sorted(areas)))) as archive:
        for member in archive:
            file = archive.extractfile(member) if member.name.endswith(".py") else None
            if file is not None:
                yield member.name, file.read().decode()


def _git(*arguments: str) -> bytes:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True).stdout


def code_lines(text: str, tree: ast.Module) -> int:
    """Count the lines that hold a token which is neither a comment nor a documentation string."""
    documented = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        and node.end_lineno is not None
        for line in range(node.lineno, node.end_lineno + 1)
    }
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    return len(found - documented)


def last_name(node: ast.expr) -> str:
    """Return the last part of an expression's name, without its arguments.

    Examples: Struct for `msgspec.Struct`, Generic for `Generic[T]`, dataclass for
    `dataclass(frozen=True)`.
    """
    while isinstance(node, ast.Subscript | ast.Call):
        node = node.value if isinstance(node, ast.Subscript) else node.func
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def record_types(trees: Mapping[str, ast.Module]) -> Counter[str]:
    """Count record types by kind; a class inherits the kind of its bases, in whatever file."""
    classes = [
        node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    ]
    kinds = dict(RECORD_BASES)
    known = -1
    while known != len(kinds):
        known = len(kinds)
        for each in classes:
            for base in map(last_name, each.bases):
                # A class that implements a Protocol is not a record type.
                if base in kinds and kinds[base] != "Protocol":
                    kinds.setdefault(each.name, kinds[base])
    counts: Counter[str] = Counter()
    for each in classes:
        if any(last_name(decorator) == "dataclass" for decorator in each.decorator_list):
            counts["dataclass"] += 1
        elif found := {kinds[base] for base in map(last_name, each.bases) if base in kinds}:
            if found != {"Protocol"} or any(last_name(base) == "Protocol" for base in each.bases):
                counts[sorted(found - {"Protocol"} or found)[0]] += 1
    return counts


def at_borders(tree: ast.Module) -> Iterator[ast.expr]:
    """Yield the annotations of public functions, of public methods, and of public classes' fields.

    Other modules can call or read these; names that begin with an underscore are private.
    """
    waiting: list[ast.AST] = [tree]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                waiting.append(node)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                if not node.target.id.startswith("_"):
                    yield node.annotation
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if node.name.startswith("_") and node.name != "__init__":
                    continue
                arguments = node.args
                for each in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
                    if each.annotation is not None:
                        yield each.annotation
                if node.returns is not None:
                    yield node.returns


def is_loose_dict(node: ast.AST) -> bool:
    """Return whether a part of an annotation is a dictionary of any values by name."""
    return isinstance(node, ast.Subscript) and ast.unparse(node) in (
        "dict[str, Any]",
        "Mapping[str, Any]",
    )


def is_bare_tuple(node: ast.AST) -> bool:
    """Return whether a part of an annotation is a tuple of unnamed fields, not a sequence."""
    if not isinstance(node, ast.Subscript) or last_name(node) != "tuple":
        return False
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    return len(parts) > 1 and ast.unparse(parts[-1]) != "..."


def count(revision: str | None) -> dict[str, int]:
    texts = dict(files_of(revision))
    trees = {name: ast.parse(text) for name, text in texts.items()}
    product = {name: tree for name, tree in trees.items() if name.startswith(PRODUCT)}
    lines = {name: code_lines(texts[name], tree) for name, tree in trees.items()}
    borders = [
        part
        for tree in product.values()
        for annotation in at_borders(tree)
        for part in ast.walk(annotation)
    ]
    kinds = record_types(product)
    return {
        "code lines": sum(lines[name] for name in product),
        # An empty __init__.py of a package does not count.
        "modules": sum(1 for name in product if lines[name] or not name.endswith("__init__.py")),
        "files above 600 lines": sum(texts[name].count("\n") > 600 for name in product),
        "record types": kinds.total(),
        **{
            f"- {kind}": kinds[kind]
            for kind in ("dataclass", *dict.fromkeys(RECORD_BASES.values()))
        },
        "dict[str, Any] at borders": sum(map(is_loose_dict, borders)),
        "bare tuples at borders": sum(map(is_bare_tuple, borders)),
        "code lines of tests": sum(n for name, n in lines.items() if name.startswith("tests/")),
        "code lines of benchmarks": sum(
            n for name, n in lines.items() if name.startswith("benchmarks/")
        ),
    }


def main() -> None:
    if len(sys.argv) not in (2, 3):
        sys.exit(
            f"got {len(sys.argv) - 1} arguments, expected BASE and perhaps NEW; name revisions"
        )
    base, new = count(sys.argv[1]), count(sys.argv[2] if len(sys.argv) == 3 else None)
    print(f"{'':28}{'base':>9}{'new':>9}{'change':>9}")
    for name, before in base.items():
        change = f"{(new[name] - before) / before:+.1%}" if before else f"{new[name] - before:+d}"
        print(f"{name:28}{before:>9,}{new[name]:>9,}{change:>9}")


if __name__ == "__main__":
    main()
