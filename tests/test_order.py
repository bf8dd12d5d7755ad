"""Tests of the order of the packages in `actors` and `service`, and for unused modules.

docs/architecture.md states the order. Each rule is also tested on a small tree that breaks it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PRODUCT = ("actors", "service", "deploy")
# Files that may start a module from outside of Python: scripts, entry points, containers.
STARTERS = ("pyproject.toml", "mkdocs.yml", "Makefile", "helm", "deploy", ".ci")
PLUGINS = "actors.environment.plugins"

Trees = Mapping[str, ast.Module]
"""Syntax trees by dotted name of the module."""
Order = Mapping[str, list[set[str]]]
"""For each top-level package, its packages and modules by layer, highest layer first."""


def read_trees(root: Path) -> Trees:
    return {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): ast.parse(
            path.read_text(encoding="utf-8")
        )
        for package in PRODUCT
        for path in sorted((root / package).rglob("*.py"))
    }


def read_order(document: str) -> Order:
    """Read the lists of the section "The order of the packages"."""
    section = document.partition("\n## The order of the packages\n")[2].partition("\n## ")[0]
    return {
        name: [set(line.split()) for line in layers.splitlines() if line.strip()]
        for name, layers in re.findall(r"```\n(\w+)/\n(.*?)```", section, flags=re.DOTALL)
    }


def imports(trees: Trees) -> Iterator[tuple[str, str]]:
    """Yield the module and the imported name for every import between modules of `trees`.

    Imports in functions and below TYPE_CHECKING count like all others.
    """
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                # A relative import is resolved, so that it is checked too.
                parents = module.split(".")[: -node.level] if node.level else []
                base = ".".join([*parents, *filter(None, [node.module])])
                names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
            else:
                continue
            yield from ((module, name) for name in names if name in trees)


def package_of(module: str) -> tuple[str, str]:
    """Return a module's package: ("service", "run") for service.run.loop."""
    top, _, rest = module.partition(".")
    return top, rest.partition(".")[0]


def imports_that_point_up(trees: Trees, order: Order) -> set[str]:
    layers = {
        (top, name): number
        for top, rows in order.items()
        for number, row in enumerate(rows)
        for name in row
    }
    return {
        f"{module} imports {name}"
        for module, name in imports(trees)
        if (source := package_of(module)) in layers
        and (target := package_of(name)) in layers
        and source[0] == target[0]
        and source[1] != target[1]
        and layers[target] <= layers[source]
    }


def imports_of_plugins(trees: Trees) -> set[str]:
    """Return the imports of plug-ins by code outside of plug-ins and the command line."""
    return {
        f"{module} imports {name}"
        for module, name in imports(trees)
        if name.startswith(PLUGINS) and not module.startswith((PLUGINS, "service.cli."))
    }


def packages(trees: Trees, top: str) -> list[str]:
    found = {package_of(module) for module in trees}
    return sorted(name for package, name in found if package == top and name)


def texts_of(trees: Trees) -> Iterator[str]:
    """Yield the strings of the product that are not documentation."""
    for tree in trees.values():
        documentation = {
            id(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        yield from (
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in documentation
        )


def has_code(tree: ast.Module) -> bool:
    return any(not isinstance(node, ast.Expr) for node in tree.body)


def is_command(module: str, tree: ast.Module) -> bool:
    """Return whether `python -m` starts a module."""
    return module.endswith(".__main__") or any(
        isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
        for node in tree.body
    )


def unused_modules(trees: Trees, texts: Iterable[str]) -> set[str]:
    """Return the modules that no other module imports, and that no text names."""
    used = {name for module, name in imports(trees) if name != module}
    named = set(re.findall(r"\b(?:actors|service|deploy)(?:\.\w+)+", "\n".join(texts)))
    # "service.api.door.middlewares" names an attribute of a module.
    named |= {name.rpartition(".")[0] for name in named}
    return {
        module
        for module, tree in trees.items()
        if has_code(tree) and not is_command(module, tree)
        if module not in used and module not in named
    }


def starting_texts(root: Path) -> Iterator[str]:
    for name in STARTERS:
        start = root / name
        for path in [start] if start.is_file() else sorted(start.rglob("*")):
            if path.is_file() and path.suffix not in (".py", ".pyc"):
                # mkdocs.yml names a module by its file.
                yield path.read_text(encoding="utf-8", errors="replace").replace("/", ".")


TREES = read_trees(REPOSITORY)
ORDER = read_order((REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8"))


def test_the_order_names_each_package_once() -> None:
    for top in ("actors", "service"):
        assert sorted(name for row in ORDER[top] for name in row) == packages(TREES, top)
        assert sum(len(row) for row in ORDER[top]) == len(packages(TREES, top))


def test_every_import_points_down() -> None:
    assert imports_that_point_up(TREES, ORDER) == set()


def test_the_core_imports_no_plugin() -> None:
    assert any(module.startswith(f"{PLUGINS}.sql.") for module in TREES)
    assert imports_of_plugins(TREES) == set()


def test_every_module_is_used() -> None:
    texts = [*starting_texts(REPOSITORY), *texts_of(TREES)]
    assert unused_modules(TREES, texts) == set()


def planted(root: Path, files: Mapping[str, str]) -> Trees:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return read_trees(root)


PLANTED_ORDER = """
## The order of the packages

```
service/
run
api  store
units
```

## Another section
"""


def test_imports_against_the_order_are_found(tmp_path: Path) -> None:
    trees = planted(
        tmp_path,
        {
            "service/__init__.py": "",
            "service/units.py": "def late():\n    import service.api.routes\n",
            "service/api/__init__.py": "",
            "service/api/routes.py": "from service import units\nfrom service.store import rows\n",
            "service/store/__init__.py": "",
            "service/store/rows.py": (
                "from typing import TYPE_CHECKING\n"
                "if TYPE_CHECKING:\n    from service.run.phase import Phase\n"
            ),
            "service/run/__init__.py": "from ..run import phase\n",
            "service/run/phase.py": "from ..units import late\nfrom service.api import routes\n",
        },
    )
    assert imports_that_point_up(trees, read_order(PLANTED_ORDER)) == {
        "service.units imports service.api.routes",
        # Packages of one layer do not import each other.
        "service.api.routes imports service.store",
        "service.api.routes imports service.store.rows",
        "service.store.rows imports service.run.phase",
    }


def test_imports_of_plugins_are_found(tmp_path: Path) -> None:
    trees = planted(
        tmp_path,
        {
            "actors/environment/registry.py": "def find():\n    from .plugins.sql import server\n",
            "actors/environment/plugins/sql/server.py": "",
            "actors/environment/plugins/sql/environment.py": f"from {PLUGINS}.sql import server\n",
            "service/cli/main.py": f"from {PLUGINS}.sql import server\n",
        },
    )
    assert imports_of_plugins(trees) == {
        f"actors.environment.registry imports {PLUGINS}.sql.server",
    }


def test_modules_that_nothing_uses_are_found(tmp_path: Path) -> None:
    trees = planted(
        tmp_path,
        {
            "service/__init__.py": "",
            "service/main.py": "import service.used\nPLUGIN = 'service.plugin.register'\n",
            "service/used.py": '"""`service.forgotten` was here."""\n',
            "service/plugin.py": "def register(): ...\n",
            "service/forgotten.py": "from service import used\n",
            "deploy/__main__.py": "import service.main\n",
        },
    )
    texts = ['rayloom = "service.main:main"', *texts_of(trees)]
    assert unused_modules(trees, texts) == {"service.forgotten"}
