"""What every compiled program depends on beside what it is made of, as values to compare.

The code that is traced: every file of the packages that programs are traced by, and the versions of
libraries. It counts for nothing where this process may have other code than its files: one was
changed since the process began (one that waits as a spare may be hours old), or a script has put
functions of its own in the place of theirs. A script that changes a number in them at run time is
known by its own source alone.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import time
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import jax

from dflop_jax.pipeline.fingerprint import LIBRARIES, SOURCES, UnknownPart

# Settings of jax that differ from start to start, or say where things are kept and told.
_APART = ("jax_compilation_cache", "jax_persistent_cache", "jax_cross_host", "jax_log", "jax_dump",
          "jax_explain", "jax_debug_log_modules", "jax_no_tracing", "jax_traceback")  # fmt: skip
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")
# Whose functions are traced, but for what only calls programs.
_TRACED = ("models.", "dflop_jax.pipeline.", "dflop_jax.contract", "dflop_jax.train.optimizer")
_CALLS = ("dflop_jax.pipeline.executor",)
# Clocks of disks differ; where the system does not tell when this process began, it is within the
# second before this file is imported.
_CLOCKS_S, _START_S = 5.0, 60.0
_INSTALLED = str(Path(jax.__file__).parents[1])


def surroundings() -> tuple[Any, ...]:
    """What every program depends on, as it is now.

    Raises:
      UnknownPart: nobody can tell what code this process would trace.
    """
    _check_as_written()
    settings = {k: getattr(jax.config, k, v) for k, v in sorted(jax.config.values.items())
                if not k.startswith(_APART)}  # fmt: skip
    flags = [os.environ.get(name, "") for name in _FLAGS]
    return sources(), _scripts(), _versions(), _processor(), repr(settings), flags


def sources() -> str:
    """A hash of the packages that programs are traced by, file by file."""
    digest, newest_s = _sources()
    if newest_s > _BEGAN_S - _CLOCKS_S:
        raise UnknownPart("source that is newer than this process")
    return digest


@cache
def _sources() -> tuple[str, float]:
    """(hash, when a file of them was changed last)."""
    digest, newest_s = hashlib.sha256(), 0.0
    for package in SOURCES:
        spec = find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            for file in sorted(Path(folder).rglob("*.py")):
                facts = file.stat()
                # No one sets the second, so that a file copied with its date is new, too.
                newest_s = max(newest_s, facts.st_mtime, facts.st_ctime)
                digest.update(f"{package} {file.relative_to(folder)} {facts.st_size}\n".encode())
                digest.update(file.read_bytes())
    return digest.hexdigest(), newest_s


def _began_s() -> float:
    """When this process began, by the clock of files."""
    with suppress(OSError, ValueError, StopIteration):  # Linux
        started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
        lines = Path("/proc/stat").read_text().splitlines()
        booted_s = next(float(x.split()[1]) for x in lines if x.startswith("btime"))
        return booted_s + int(started) / os.sysconf("SC_CLK_TCK")
    return time.time() - _START_S


_BEGAN_S = _began_s()


def _check_as_written() -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith(_TRACED) and name not in _CALLS and module is not None:
            for holder in (module, *_classes_of(module)):
                for what, value in list(vars(holder).items()):
                    function = getattr(value, "__func__", value)
                    if isinstance(function, FunctionType) and _is_from_elsewhere(function):
                        raise UnknownPart(f"{name}: {what} is another function")


def _classes_of(module: ModuleType) -> list[type]:
    values = list(vars(module).values())
    return [v for v in values if isinstance(v, type) and v.__module__ == module.__name__]


def _is_from_elsewhere(function: FunctionType) -> bool:
    space = function.__globals__
    name = space.get("__name__", "")
    # Python makes a named tuple's __new__ in a space of its own.
    return not name.startswith("namedtuple_") and _is_elsewhere(name, space.get("__file__"))


def _is_elsewhere(name: str, file: str | None) -> bool:
    """Whether code is neither of this project, nor Python's, nor an installed library's."""
    package = name.partition(".")[0]
    if package in SOURCES or package in sys.stdlib_module_names - {"__main__"}:
        return False
    return not (file or "").startswith(_INSTALLED)


def _scripts() -> list[str]:
    """Hashes of the files of code from elsewhere that is loaded, such as a script or an experiment:
    it may have changed what it imports."""
    hashes = []
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and _is_elsewhere(name, file):
            with suppress(OSError):
                hashes.append(hashlib.sha256(Path(file).read_bytes()).hexdigest())
    return sorted(hashes)


@cache
def _versions() -> tuple[str, ...]:
    def known(library: str) -> str:
        try:
            return version(library)
        except PackageNotFoundError:
            return ""

    backend = jax.devices()[0].client
    libraries = (f"{library} {known(library)}" for library in LIBRARIES)
    return (sys.version, *libraries, backend.platform, backend.platform_version)


@cache
def _processor() -> str:
    """What XLA compiles for on a CPU: its instructions, where the system tells them."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        kept = {x for x in lines if x.startswith(("flags", "Features", "model name", "CPU part"))}
        return "\n".join(sorted(kept))
    return f"{platform.machine()} {platform.processor()} {platform.version()}"
