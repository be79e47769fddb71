"""No code that no run uses: every module is reached from what runs.

What runs are the commands, the processes that are started with `-m` or `-c`, and the factories of
models. Imports are read from the source, those inside functions included; a package's re-exports
count for nothing but the names that are taken from it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Started as processes of their own, by file or by name.
STARTED = (
    "dflop_jax.data.pool.fork_server_main",
    "dflop_jax.data.build",
    "dflop_jax.aot.worker",
)
NAMED = re.compile(r"dflop_jax[\w.]*:\w+")  # MODULE:FUNCTION, as configurations and models have it


def sources(root: Path) -> dict[str, ast.Module]:
    """Return the product's modules by dotted name."""
    trees = {}
    for top in ("dflop_jax", "models"):
        for file in sorted((root / top).rglob("*.py")):
            parts = file.relative_to(root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            trees[name] = ast.parse(file.read_text(encoding="utf-8"))
    return trees


def exported(trees: dict[str, ast.Module], root: Path) -> dict[tuple[str, str], str]:
    """Return for (package, name) the module that a package takes the name from."""
    names = {}
    for package, tree in trees.items():
        if not (root.joinpath(*package.split(".")) / "__init__.py").exists():
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    names[package, alias.asname or alias.name] = node.module
            elif isinstance(node, ast.Dict):  # names that are imported on first use
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and isinstance(value, ast.Constant):
                        names[package, str(key.value)] = str(value.value)
    return names


def used(
    module: str, trees: dict[str, ast.Module], names: dict[tuple[str, str], str]
) -> Iterator[str]:
    """Yield the modules that a module imports."""
    for node in ast.walk(trees[module]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                target = full if full in trees else names.get((node.module, alias.name))
                yield node.module
                while target is not None and target in trees:
                    yield target
                    target = names.get((target, alias.name))
        elif isinstance(node, ast.Constant) and NAMED.fullmatch(str(node.value)):
            yield str(node.value).partition(":")[0]


def imported_by(start: str, trees: dict[str, ast.Module]) -> set[str]:
    """The modules of the project that one brings with it, by whatever they import."""
    names, seen, rest = exported(trees, ROOT), set[str](), [start]
    while rest:
        module = rest.pop()
        if module in trees and module not in seen:
            seen.add(module)
            rest += used(module, trees, names)
    return seen


def unreached(root: Path, started: tuple[str, ...] = STARTED) -> list[str]:
    """Return the modules that nothing which runs imports."""
    trees = sources(root)
    names = exported(trees, root)
    start = [m for m in trees if m.split(".")[:2] == ["dflop_jax", "cli"]]
    start += [m for m in started if m in trees]
    for m, tree in trees.items():
        builds = any(isinstance(n, ast.FunctionDef) and n.name == "build" for n in tree.body)
        if m.startswith("models.") and builds:
            start.append(m)
    seen: set[str] = set()
    while start:
        module = start.pop()
        if module in seen or module not in trees:
            continue
        seen.add(module)
        if (root.joinpath(*module.split(".")) / "__init__.py").exists():
            continue  # what is taken from a package was followed by name
        start += used(module, trees, names)
    packages = {m for m in trees if (root.joinpath(*m.split(".")) / "__init__.py").exists()}
    return sorted(trees.keys() - seen - packages)


def test_every_module_is_reached_by_something_that_runs():
    assert unreached(ROOT) == []


def test_the_worker_reaches_the_solver():
    """From the worker's process alone: `balance` is measured, so it has to be what runs."""
    trees = sources(ROOT)
    names = exported(trees, ROOT)
    seen = imported_by("dflop_jax.schedule.worker", trees)
    assert "dflop_jax.schedule.local_search" in seen
    assert "jax" not in {name.split(".")[0] for m in seen for name in used(m, trees, names)}


def test_a_module_that_nothing_imports_is_found(tmp_path):
    for name, text in {
        "dflop_jax/__init__.py": "",
        "dflop_jax/cli/__init__.py": "from dflop_jax.cli.main import main",
        "dflop_jax/cli/main.py": "def main():\n  from dflop_jax.a import x",
        "dflop_jax/a/__init__.py": "from dflop_jax.a.b import x\nfrom dflop_jax.a.c import y",
        "dflop_jax/a/b.py": "x = 1",
        "dflop_jax/a/c.py": "y = 1",
        "models/m.py": "import models.layers\ndef build(): ...",
        "models/layers.py": "",
        "models/left.py": "",
    }.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert unreached(tmp_path) == ["dflop_jax.a.c", "models.left"]
