"""The scripts of `benchmarks/`: run as commands of their own, or as modules of this process."""

from __future__ import annotations

import importlib
import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def run(name: str, *arguments, **options) -> subprocess.CompletedProcess[str]:
    """A finished script, with what it wrote."""
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def module(name: str) -> ModuleType:
    """A script as a module; what it imports may lie beside it."""
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    return importlib.import_module(name)


def refusal(name: str, *arguments) -> str:
    """What a script says in this process, where it ends with exit code 2."""
    said = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(said),
        redirect_stderr(said),
    ):
        patch.setattr(sys, "argv", [name, *map(str, arguments)])
        try:
            code = module(name).main()
        except SystemExit as left:
            code = left.code
    assert code == 2
    return said.getvalue()
