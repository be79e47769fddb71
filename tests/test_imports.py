"""The tree obeys its rules: imports point one way, every module is reached, files stay short, and
only `data/media` and models name a modality.

Nothing is executed. A stage is a file or folder directly under dflop_jax.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAX_LINES = 400

LEFT = {"records", "contract", "config", "config_fields", "child_processes", "folders"}
DATA = LEFT | {"data", "hardware"}
SCHEDULED = DATA | {"profile", "schedule"}
PREDICTED = SCHEDULED | {"simulate"}
RUNTIME = PREDICTED | {"runtime", "plan", "report", "weights", "distributed", "checkpoint"}
ENGINE = RUNTIME | {"train", "generate", "preflight"}
# Stage -> what it may import of dflop_jax, besides itself.
MAY_IMPORT: dict[str, set[str]] = {
    "records": set(),
    "child_processes": set(),
    "folders": set(),
    "contract": {"records"},
    "config": {"records", "config_fields"},
    "config_fields": set(),
    "data": LEFT,
    "hardware": LEFT,
    "simulate": LEFT,
    "runtime": LEFT | {"simulate"},
    "weights": LEFT | {"runtime", "simulate"},
    "profile": DATA | {"runtime", "simulate"},  # it times the runtime's own programs
    "schedule": DATA | {"simulate"},
    "plan": PREDICTED,
    "report": LEFT,
    "distributed": LEFT | {"hardware"},  # how much of a device jax takes
    "checkpoint": LEFT | {"runtime", "distributed"},
    "train": RUNTIME,
    "preflight": RUNTIME | {"train"},
    "generate": ENGINE,
    "aot": ENGINE,
    "verify": ENGINE,
    "cli": ENGINE | {"aot", "verify"},
    "__main__": {"cli"},
    "__init__": ENGINE,  # the package root re-exports
}
FOREIGN = {"dflop_jax", "models", "experiments", "benchmarks", "tests"}
# Top folder -> which of our other top folders it may import.
TOP_MAY_IMPORT = {"dflop_jax": set[str](), "models": set[str]()}


@cache
def parsed(file: Path) -> ast.Module:
    """A file's source; every check reads it."""
    return ast.parse(file.read_text(encoding="utf-8"))


def module_of(file: Path, root: Path) -> str:
    """Dotted name of a source file; a package is its `__init__`."""
    return ".".join(file.relative_to(root).with_suffix("").parts)


def imported(file: Path, root: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import in a file, those inside functions included."""
    package = file.relative_to(root).parent.parts
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            stem = ".".join([*base, *([node.module] if node.module else [])])
            # `from package import name` reaches a module when there is one of that name.
            for alias in node.names:
                full = f"{stem}.{alias.name}"
                at = root.joinpath(*full.split("."))
                is_module = at.with_suffix(".py").exists() or at.is_dir()
                yield node.lineno, full if is_module else stem


def stage(module: str) -> str:
    """Stage of a dotted dflop_jax name; the package itself is "__init__"."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def forbidden_imports(root: Path) -> list[str]:
    """Arrows against the design, as "file:line: why"."""
    found = []
    for top, others in TOP_MAY_IMPORT.items():
        for file in sorted((root / top).rglob("*.py")):
            here = module_of(file, root)
            for line, name in imported(file, root):
                where, target = f"{file.relative_to(root)}:{line}", name.split(".")[0]
                if target not in FOREIGN or target in others:
                    continue
                if target != top:
                    found.append(f"{where}: {top} imports {target}")
                elif top == "dflop_jax":
                    source, dest = stage(here), stage(name)
                    if source not in MAY_IMPORT:
                        found.append(f"{where}: unknown stage {source}, give it a row here")
                    elif dest != source and dest not in MAY_IMPORT[source]:
                        found.append(f"{where}: {source} imports {dest}")
    return found


def circles(root: Path) -> list[list[str]]:
    """Modules of ours that import each other, also by way of others, also for their types only."""
    sources = [
        f for top in (*TOP_MAY_IMPORT, "experiments") for f in sorted((root / top).rglob("*.py"))
    ]
    files = {module_of(f, root).removesuffix(".__init__"): f for f in sources}
    imports = {m: {n for _, n in imported(f, root) if n in files} for m, f in files.items()}
    left = {m: names - {m} for m, names in imports.items()}
    # What imports nothing that is left, and what nothing that is left imports, is in no circle.
    while loose := {m for m, names in left.items() if not names & left.keys()} | (
        left.keys() - set().union(*left.values())
    ):
        left = {m: names - loose for m, names in left.items() if m not in loose}
    return [[m, *sorted(names)] for m, names in left.items()]


def long_files(root: Path) -> list[str]:
    """Sources above MAX_LINES whose docstring has no line that starts with "Long because"."""
    found = []
    for top in sorted(FOREIGN):
        for file in sorted((root / top).rglob("*.py")):
            text = file.read_text(encoding="utf-8")
            n_lines = len(text.splitlines())
            if n_lines <= MAX_LINES:
                continue
            doc = ast.get_docstring(ast.parse(text)) or ""
            if not any(line.startswith("Long because") for line in doc.splitlines()):
                found.append(f"{file.relative_to(root)}: {n_lines} lines")
    return found


# ---- what runs ----

# Started as processes of their own, by file or by name.
STARTED = ("dflop_jax.data.process_pool", "dflop_jax.data.build", "dflop_jax.aot.worker")
NAMED = re.compile(r"dflop_jax[\w.]*:\w+")  # MODULE:FUNCTION, as configurations and models have it


@cache
def product_files(root: Path) -> dict[str, Path]:
    """The product's modules by dotted name."""
    files = [f for top in TOP_MAY_IMPORT for f in sorted((root / top).rglob("*.py"))]
    return {module_of(f, root).removesuffix(".__init__"): f for f in files}


@cache
def exports(root: Path) -> dict[str, str]:
    """Package.NAME -> the module that a package takes the name from, on first use too."""
    names = {}
    for package, file in product_files(root).items():
        for node in ast.walk(parsed(file)) if file.name == "__init__.py" else ():
            if isinstance(node, ast.ImportFrom) and node.module:
                names |= {f"{package}.{a.asname or a.name}": node.module for a in node.names}
            elif isinstance(node, ast.Dict):
                pairs = zip(node.keys, node.values, strict=True)
                names |= {
                    f"{package}.{k.value}": str(v.value) for k, v in pairs if hasattr(v, "value")
                }
    return names


def used(module: str, root: Path) -> Iterator[str]:
    """The modules that a module imports, by names that packages export, and as MODULE:FUNCTION."""
    file, names = product_files(root)[module], exports(root)
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                target: str | None = f"{node.module}.{alias.name}"
                while target is not None:
                    yield target
                    target = names.get(target) or names.get(f"{target}.{alias.name}")
        elif isinstance(node, ast.Constant) and NAMED.fullmatch(str(node.value)):
            yield str(node.value).partition(":")[0]
    yield from (name for _, name in imported(file, root))


def reached(starts: Iterable[str], root: Path, *, packages: bool = False) -> set[str]:
    """The modules that some modules import, packages by name or, with `packages`, in whole."""
    files, seen, rest = product_files(root), set[str](), [*starts]
    while rest:
        module = rest.pop()
        if module in files and module not in seen:
            seen.add(module)
            if packages or files[module].name != "__init__.py":
                rest += used(module, root)
    return seen


def unreached(root: Path) -> list[str]:
    """Modules that nothing which runs imports: no command, started process or model factory."""
    files = product_files(root)
    starts = [m for m in files if m.startswith("dflop_jax.cli") or m in STARTED]
    for m, file in files.items():
        functions = {n.name for n in parsed(file).body if isinstance(n, ast.FunctionDef)}
        starts += [m] if m.startswith("models.") and "build" in functions else []
    packages = {m for m, file in files.items() if file.name == "__init__.py"}
    return sorted(files.keys() - reached(starts, root) - packages)


# ---- modalities ----

ROOMS = ("runtime", "schedule", "plan", "simulate", "profile", "records", "data", "train")
# Drawn scenes are pictures of so many tiles; a published tokenizer names its special token.
MODALITY_WORDS = {"data/datasets/scenes.py": {"tiles"}, "data/text/tokenize.py": {"visual"}}
WORDS = re.compile(r"(?<![a-z])(llms?|vision|visual|audio|tiles)(?![a-z])", re.IGNORECASE)


def modalities(text: str) -> list[tuple[int, str]]:
    """(line, word) of every name and string of a source that names a modality."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    named = [t for t in tokens if t.type in (tokenize.NAME, tokenize.STRING)]
    return [(t.start[0], word.lower()) for t in named for word in WORDS.findall(t.string)]


# ---- the tree ----


@pytest.mark.parametrize("check", [
    forbidden_imports, circles, unreached, long_files,
])  # fmt: skip
def test_the_tree_obeys(check):
    assert check(ROOT) == []


def test_the_schedule_worker_imports_no_jax():
    """`balance` is measured in its process, so it has to be what runs."""
    modules = reached(["dflop_jax.schedule.worker"], ROOT, packages=True)
    assert "dflop_jax.schedule.local_search" in modules
    assert "jax" not in {name.split(".")[0] for m in modules for name in used(m, ROOT)}


@pytest.mark.parametrize("room", ROOMS)
def test_no_modality_is_named(room):
    root = ROOT / "dflop_jax"
    files = [f for f in (root / room).rglob("*.py") if root / "data" / "media" not in f.parents]
    assert files
    for file in files:
        name = file.relative_to(root).as_posix()
        words = modalities(file.read_text(encoding="utf-8"))
        assert [w for w in words if w[1] not in MODALITY_WORDS.get(name, ())] == [], name


# ---- the checks see what is wrong ----


def test_what_is_wrong_is_found(tmp_path):
    for name, text in {
        "dflop_jax/simulate/a.py": "from dflop_jax.runtime.b import x\nfrom ..runtime import b",
        "dflop_jax/runtime/b.py": "def f():\n  import dflop_jax.train.a",
        "dflop_jax/data/a.py": "from dflop_jax import balance\nimport models.llava",
        "dflop_jax/new/a.py": "import dflop_jax.config",
        "dflop_jax/__init__.py": "from dflop_jax.train.a import Trainer",
        "dflop_jax/cli/__init__.py": "from dflop_jax.cli.main import main",
        "dflop_jax/cli/main.py": "def main():\n  from dflop_jax.simulate.a import x",
        "models/a.py": "import typing\nif typing.TYPE_CHECKING:\n  from models.b import x",
        "models/b.py": "def build():\n  from models import a",
        "models/left.py": "import jax",
        "tests/file.py": "# Long because I say so\n" + "x = 1\n" * MAX_LINES,
        "tests/table.py": '"""A.\n\nLong because it is one table.\n"""\n' + "x = 1\n" * MAX_LINES,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert [line.partition(": ")[2] for line in forbidden_imports(tmp_path)] == [
        "data imports __init__",
        "dflop_jax imports models",
        "unknown stage new, give it a row here",
        "runtime imports train",
        "simulate imports runtime",
        "simulate imports runtime",
    ]
    assert circles(tmp_path) == [["models.a", "models.b"], ["models.b", "models.a"]]
    assert [f.split(":")[0] for f in long_files(tmp_path)] == ["tests/file.py"]
    assert unreached(tmp_path) == ["dflop_jax.data.a", "dflop_jax.new.a", "models.left"]
    source = 'x = "llm"\nvision_ranks = 1\ndef f(n_tiles): ...\na.audio.b\n'
    assert [line for line, _ in modalities(source)] == [1, 2, 3, 4]
    assert modalities("projectile = fertile = 1  # the llm\n") == []
