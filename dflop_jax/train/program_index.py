"""Finds compiled programs before they are traced, so that a start of a run that was here traces
none.

The compilation cache knows a program by what was traced. Here it is known by what it is traced
from: `pipeline.fingerprint` of the job that lowers it, and of `surroundings`. An entry holds the
name of the program in the compilation cache and what jax needs beside it to call it. The program
itself is read from there, so it is the very one that a traced start finds. (jax cannot serialise
again what it has loaded from there: the copy lacks functions when it is called.) What has no
fingerprint, is not in the cache, or does not load, is traced.

Entries are pickled by jax, as compiled programs are code in any case: who can write into the cache
folder can run what they like.
"""

from __future__ import annotations

import io
import logging
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
from jax._src import compilation_cache
from jax._src.lib import xla_client
from jax.experimental import serialize_executable

from dflop_jax.pipeline.compiling import Job
from dflop_jax.pipeline.fingerprint import UnknownPart, fingerprint
from dflop_jax.pipeline.out_of_memory import ran_out
from dflop_jax.train.compile_cache import Asked, CheckedFiles, asked_here, keep_used
from dflop_jax.train.surroundings import surroundings

FOLDER = "programs"
_EXECUTABLE = "executable"
log = logging.getLogger("dflop_jax")


class ProgramIndex:
    """The programs of a cache folder. `n_loaded` of them were loaded here."""

    def __init__(self, folder: str | Path):
        self._files = CheckedFiles(Path(folder) / FOLDER, "how to call a program")
        self.n_loaded = 0
        self._around: tuple[Any, ...] | None = None
        with suppress(UnknownPart):
            self._around = surroundings()

    def name(self, job: Job) -> str:
        """See `KnownPrograms.name`."""
        if self._around is not None:
            with suppress(UnknownPart):
                return fingerprint(job, self._around)
        return ""

    def load(self, name: str, devices: list[jax.Device]) -> jax.stages.Compiled | None:
        """See `KnownPrograms.load`."""
        entry = self._files.get(name) if name else None
        program = _loaded(entry, devices) if entry is not None else None
        self.n_loaded += program is not None
        return program

    def compile(self, name: str, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """See `KnownPrograms.compile`; it is found in the compilation cache where it is there."""
        with asked_here() as asked:
            program = lowered.compile()
        if name and asked:
            with suppress(OSError):
                self._keep(name, program, asked[-1])
        return program

    def _keep(self, name: str, program: jax.stages.Compiled, asked: Asked) -> None:
        try:
            entry = _entry(program, asked)
        except Exception as e:  # jax refuses some, as those that call back to Python
            log.debug("a program that cannot be kept: %s", e)
            return
        if entry:
            self._files.put(name, entry)


def forget_unused(folder: str | Path, most_gib: float) -> None:
    """Remove the programs of a cache folder, and what is known of them, that were used longest ago;
    see `Config.cache_gib`."""
    if most_gib and _keeps_programs():
        programs = Path(jax.config.values["jax_compilation_cache_dir"])
        keep_used((programs, Path(folder) / FOLDER), most_gib * 2**30)


def program_index(folder: str | Path) -> ProgramIndex | None:
    """The index of a cache folder; None where jax keeps no programs, or forgets some itself."""
    return ProgramIndex(folder) if _keeps_programs() else None


def _keeps_programs() -> bool:
    """Whether programs are kept, and not by jax alone; asked before devices are there."""
    values = jax.config.values
    is_on = values["jax_compilation_cache_dir"] and values["jax_enable_compilation_cache"]
    return bool(is_on) and values["jax_compilation_cache_max_size"] == -1


# ---- what an entry holds ----


class _Pickler(serialize_executable._JaxPjrtPickler):
    """Leaves the program itself to the compilation cache."""

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, xla_client.LoadedExecutable):
            return (_EXECUTABLE,)
        return super().persistent_id(obj)


class _Unpickler(serialize_executable._JaxPjrtUnpickler):
    def __init__(self, file: io.BytesIO, devices: list[jax.Device], executable: Any):
        super().__init__(file, devices[0].client, devices)
        self._executable = executable

    def persistent_load(self, pid: Any) -> Any:
        return self._executable if pid == (_EXECUTABLE,) else super().persistent_load(pid)


def _entry(program: jax.stages.Compiled, asked: Asked) -> bytes | None:
    executable = program._executable._unloaded_executable  # type: ignore[attr-defined]
    if program._params.const_args or executable.host_callbacks or executable.mut:
        return None
    infos, in_tree = jax.tree.flatten(program.args_info)
    file = io.BytesIO()
    _Pickler(file).dump((executable, infos, in_tree, program.out_tree, program._no_kwargs))
    return pickle.dumps((asked.name, asked.options, file.getvalue()))


def _loaded(entry: bytes, devices: list[jax.Device]) -> jax.stages.Compiled | None:
    """The program of an entry; None where the compilation cache has it no more."""
    try:
        name, options, facts = pickle.loads(entry)
        options = xla_client.CompileOptions.ParseFromString(options)
        on = xla_client.DeviceList(tuple(devices))
        read = compilation_cache.get_executable_and_time
        executable, _ = read(name, options, devices[0].client, on)
        if executable is None:
            return None
        unloaded, infos, *trees = _Unpickler(io.BytesIO(facts), devices, executable).load()
        in_tree, out_tree, no_kwargs = trees
        args_info = in_tree.unflatten(infos)
        return jax.stages.Compiled(unloaded.load(), [], args_info, out_tree, no_kwargs=no_kwargs)
    except Exception as e:
        if ran_out(e):
            raise
        log.warning("a program in the cache cannot be loaded (%s); it is traced again", e)
        return None
