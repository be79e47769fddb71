"""The scripts of `benchmarks/`: run as commands of their own, or as modules of this process."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

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
