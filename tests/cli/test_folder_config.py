"""A run folder may be anybody's: of the code that its config.json names only ours is called."""

import sys
from pathlib import Path

import jax
import msgspec
import pytest

from dflop_jax.config import Config, DataConfig, ModelConfig
from tests.cli.command_line import refused

ASKED = {"generate": ("run", "--prompt", "What?"), "export": ("run", "--out", "out")}
# Leaves a file when it is imported and another when it is called.
FOREIGN = """
from pathlib import Path
Path("imported").touch()

def build(*args, **options):
    Path("called").touch()
    raise ValueError("the foreign factory was called")
"""
commands = pytest.mark.parametrize("command", ASKED)


@pytest.fixture(autouse=True)
def _imports_end_with_the_test(monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path[:])
    yield
    sys.modules.pop("foreign", None)


def make_folder(factory="models.llava:build", **fields):
    """A run folder of a model at its smallest, with no checkpoint in it."""
    config = Config(model=ModelConfig(factory=factory, size="anyres-nano"), **fields)
    Path("run").mkdir()
    Path("run/config.json").write_bytes(msgspec.json.encode(config))


def touched():
    """Whether foreign code ran."""
    return Path("imported").exists() or Path("called").exists()


@pytest.mark.parametrize(
    "factory",
    [
        "foreign:build", "models_foreign.x:build", "models:build", "models.gone:build",
        "models.llava:gone", "models.llava:made",  # a function that the module imports
        "models.llava:Published",  # a class, and an imported one
        "models.wan:jax", "models.wan:jax.jit", "models.wan.jax:jit", "models.hf:json.loads",
        "models.llava:build.__call__", "models..foreign:build", "models.llava:build\n",
        "models.llava\x1b[2J:build", "models.llava", "",
    ],
)  # fmt: skip
def test_code_that_a_folder_names_is_not_called(factory, capsys):
    for name in ("foreign.py", "models_foreign/x.py"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(FOREIGN)
    sys.path.insert(0, str(Path.cwd()))
    make_folder(factory)
    line = refused(capsys, "export", *ASKED["export"])
    assert f"run/config.json: model.factory={factory!r} is not a function of this program's" in line
    assert ("--model.factory MODULE:FUNCTION" in line, "\x1b" in line) == (True, False)
    assert not touched()


@commands
def test_a_folder_called_models_where_one_stands_is_not_ours(command, capsys, monkeypatch):
    Path("models").mkdir()
    Path("models/__init__.py").write_text("")
    Path("models/llava.py").write_text(FOREIGN)
    sys.path.insert(0, str(Path.cwd()))  # as `python -m dflop_jax.cli` has it
    for name in [n for n in sys.modules if n.partition(".")[0] == "models"]:
        monkeypatch.delitem(sys.modules, name)
    make_folder()
    line = refused(capsys, command, *ASKED[command])
    assert f"Python finds models in {Path.cwd() / 'models'}" in line
    assert not touched()


@commands
def test_a_flag_that_names_it_allows_it(command, capsys):
    Path("foreign.py").write_text(FOREIGN)
    make_folder("foreign:build")
    flag = ("--model.factory", "foreign:build")
    assert "the foreign factory was called" in refused(capsys, command, *ASKED[command], *flag)
    assert touched()


@commands
def test_neither_data_nor_compiled_programs_of_a_folder_are_run(command, capsys):
    """Answers need no data; and a cache of compiled programs is machine code."""
    Path("foreign.py").write_text(FOREIGN)
    sys.path.insert(0, str(Path.cwd()))
    cache = Path("run/cache")
    make_folder(data=DataConfig(factory="foreign:build"), cache_dir=str(cache))
    assert "no checkpoint in it" in refused(capsys, command, *ASKED[command])
    assert not touched()
    assert not cache.exists()
    assert jax.config.jax_compilation_cache_dir != str(cache.resolve() / "xla")
