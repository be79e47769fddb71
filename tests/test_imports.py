"""The tree obeys design.md: imports point one way, between modules too, and files and lists of
arguments stay short.

Imports are read from the source by `ast`, nothing is executed. A stage is a file or folder directly
under dflop_jax.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
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

MAX_ARGUMENTS = 8  # of a function, without `self`; more go into a record
# Functions with more, and why.
MANY_ARGUMENTS = {
    # What every model calls, by name: three arrays, what is known of tokens, what they see, where.
    "models/attention.py:attention",
    # The arguments of a kernel are its references to memory, those of its gradient what it keeps.
    "models/attention_cudnn.py:backward",
    "models/attention_cudnn.py:call_backward",
    "models/attention_gpu.py:backward",
    "models/attention_gpu.py:_call_kernel",
    "models/attention_kernels.py:forward_kernel",
    "models/attention_kernels.py:kv_kernel",
    "models/attention_kernels.py:q_kernel",
}

# Files that read private names of jax, and what no public name gives them.
PRIVATE_JAX = {
    "dflop_jax/distributed/messages.py",  # jax's client of its coordination service
    "dflop_jax/distributed/processes.py",  # jax's Slurm, Open MPI and Kubernetes variables
    "dflop_jax/train/compile_cache.py",  # compiled programs kept by every process
    "models/attention_cudnn.py",  # cuDNN attention over packed rows
}


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


def long_signatures(root: Path, allowed: set[str]) -> list[str]:
    """Functions of more than MAX_ARGUMENTS arguments, as "file:function: arguments"; and those that
    are allowed them but have no more."""
    found = {}
    for top in (*TOP_MAY_IMPORT, "experiments"):
        for file in sorted((root / top).rglob("*.py")):
            for node in ast.walk(parsed(file)):
                if isinstance(node, ast.FunctionDef) and n_arguments(node) > MAX_ARGUMENTS:
                    found[f"{file.relative_to(root)}:{node.name}"] = n_arguments(node)
    long = [f"{name}: {n}" for name, n in found.items() if name not in allowed]
    return long + [f"{name}: has no more any more" for name in sorted(allowed - found.keys())]


def n_arguments(function: ast.FunctionDef) -> int:
    a = function.args
    named = [x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
    return len(named) - (named[:1] in (["self"], ["cls"])) + bool(a.vararg) + bool(a.kwarg)


def is_private_jax(name: str) -> bool:
    """Whether a dotted name is jax's own business; all of jaxlib is."""
    top, *parts = name.split(".")
    return top == "jaxlib" or (top == "jax" and any(re.match("_(?!_)", p) for p in parts))


def private_jax(root: Path, allowed: set[str]) -> list[str]:
    """Uses of private names of jax outside of `allowed` files, as "file:line: name"; and files that
    are allowed them but read none."""
    found, users = [], set()
    for top in TOP_MAY_IMPORT:
        for file in sorted((root / top).rglob("*.py")):
            here = str(file.relative_to(root))
            for line, name in names_of_jax(file):
                users.add(here)
                if here not in allowed:
                    found.append(f"{here}:{line}: {name}")
    return found + [f"{here}: reads none any more" for here in sorted(allowed - users)]


def names_of_jax(file: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every private name of jax in a file: imported, or reached as
    `jax.x._y`."""
    for node in ast.walk(parsed(file)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            names = [ast.unparse(node)]
        yield from ((node.lineno, name) for name in names if is_private_jax(name))


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


def test_imports_point_one_way():
    assert forbidden_imports(ROOT) == []


def test_no_modules_import_each_other():
    assert circles(ROOT) == []


def test_what_takes_many_arguments_takes_a_record():
    assert long_signatures(ROOT, MANY_ARGUMENTS) == []


def test_private_names_of_jax_are_read_in_stated_places():
    assert private_jax(ROOT, PRIVATE_JAX) == []


@pytest.mark.parametrize(
    "text, private",
    [
        ("from jax._src import xla_bridge", True),
        ("def f():\n  from jaxlib import xla_client", True),
        ("import jax\njax._src.core.f()", True),
        ("from jax import numpy\nimport jax.experimental.pallas", False),
        ("import jax\njax.config.update('jax_platforms', jax.__version__)\nself._jax = 1", False),
    ],
)
def test_a_private_name_of_jax_is_found(tmp_path, text, private):
    write(tmp_path, "models/a.py", text)
    found = private_jax(tmp_path, set())
    assert all(f.startswith("models/a.py:") for f in found)
    assert bool(found) is private
    assert private_jax(tmp_path, {"models/a.py"}) == (
        [] if private else ["models/a.py: reads none any more"]
    )


def test_no_file_is_long_without_a_reason():
    assert long_files(ROOT) == []


def test_the_walk_sees_this_tree():
    """An empty walk would pass everything."""
    here = set(imported(ROOT / "dflop_jax" / "report" / "compare.py", ROOT))
    assert "dflop_jax.report.summary" in {name for _, name in here}
    assert len(list((ROOT / "dflop_jax").rglob("*.py"))) > 10


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


@pytest.mark.parametrize(
    "file, text, why",
    [
        (
            "dflop_jax/simulate/a.py",
            "from dflop_jax.runtime.b import x",
            "simulate imports runtime",
        ),
        ("dflop_jax/simulate/a.py", "from ..runtime import b", "simulate imports runtime"),
        (
            "dflop_jax/runtime/b.py",
            "def f():\n  import dflop_jax.train.a",
            "runtime imports train",
        ),
        ("dflop_jax/data/a.py", "from dflop_jax import balance", "data imports __init__"),
        ("dflop_jax/records.py", "import dflop_jax.config", "records imports config"),
        ("dflop_jax/new/a.py", "import dflop_jax.config", "unknown stage new"),
        ("dflop_jax/train/a.py", "import models.llava", "dflop_jax imports models"),
        ("models/a.py", "from dflop_jax.contract import Module", "models imports dflop_jax"),
    ],
)
def test_a_forbidden_arrow_is_found(tmp_path, file, text, why):
    write(tmp_path, "dflop_jax/runtime/b.py", "")
    write(tmp_path, "dflop_jax/simulate/c.py", "")
    write(tmp_path, file, text)
    found = forbidden_imports(tmp_path)
    assert len(found) == 1
    assert found[0].startswith(f"{file}:")
    assert why in found[0]


@pytest.mark.parametrize(
    "file, text",
    [
        ("dflop_jax/simulate/a.py", "from dflop_jax.simulate.task_order import x"),
        ("dflop_jax/runtime/b.py", "from ..simulate.task_order import x\nimport jax"),
        ("dflop_jax/train/a.py", "from dflop_jax import report"),
        ("dflop_jax/__init__.py", "from dflop_jax.train.a import Trainer"),
        ("experiments/demo.py", "import models.llava, dflop_jax"),
    ],
)
def test_a_right_arrow_is_not(tmp_path, file, text):
    write(tmp_path, "dflop_jax/simulate/task_order.py", "")
    write(tmp_path, "dflop_jax/report/a.py", "")
    write(tmp_path, file, text)
    assert forbidden_imports(tmp_path) == []


@pytest.mark.parametrize(
    "texts, found",
    [
        ({"a": "from models.b import x", "b": "import models.c", "c": ""}, []),
        ({"a": "import models.b", "b": "from models import a"}, [["a", "b"], ["b", "a"]]),
        (
            {
                "a": "import typing\nif typing.TYPE_CHECKING:\n  from models.c import x",
                "b": "def f():\n  from models import a",
                "c": "from . import b",
                "d": "import models.a",
            },
            [["a", "c"], ["b", "a"], ["c", "b"]],
        ),
        ({"p/__init__": "from models.p.q import x", "p/q": "import models.p"},
         [["p", "p.q"], ["p.q", "p"]]),
    ],
)  # fmt: skip
def test_a_circle_is_found(tmp_path, texts, found):
    for name, text in texts.items():
        write(tmp_path, f"models/{name}.py", text)
    assert circles(tmp_path) == [[f"models.{m}" for m in circle] for circle in found]


@pytest.mark.parametrize(
    "text, found",
    [
        ("def f(a, b, /, c, d, e, f, g, *, h): ...", []),
        ("def f(a, b, c, d, e, f, g, h, *more, **others): ...", ["f: 10"]),
        ("class A:\n  def f(self, a, b, c, d, e, f, g, h, i=1): ...", ["f: 9"]),
    ],
)
def test_a_long_signature_is_found(tmp_path, text, found):
    write(tmp_path, "experiments/a.py", text)
    assert long_signatures(tmp_path, set()) == [f"experiments/a.py:{f}" for f in found]
    gone = [] if found else ["experiments/a.py:f: has no more any more"]
    assert long_signatures(tmp_path, {"experiments/a.py:f"}) == gone


@pytest.mark.parametrize(
    "n_lines, doc, ok",
    [
        (MAX_LINES, '"""A."""', True),
        (MAX_LINES + 1, "# Long because I say so", False),
        (MAX_LINES + 1, '"""A.\n\nLong because it is one table.\n"""', True),
    ],
)
def test_a_long_file_needs_a_reason(tmp_path, n_lines, doc, ok):
    filler = "x = 1\n" * (n_lines - len(doc.splitlines()))
    write(tmp_path, "models/big.py", f"{doc}\n{filler}")
    assert (long_files(tmp_path) == []) == ok
