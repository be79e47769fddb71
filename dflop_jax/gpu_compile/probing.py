"""Compiles probes in processes of their own, several at once; what was compiled is kept on disk."""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from functools import cache
from pathlib import Path
from queue import Empty, SimpleQueue

import jax
import msgspec

from dflop_jax.children import Child
from dflop_jax.config import Config
from dflop_jax.contract import MultimodalModel, edges_of
from dflop_jax.gpu_compile.probes import Found, Probe, Setting, compiled_probe
from dflop_jax.gpu_compile.toolchain import compiler_environment
from dflop_jax.hardware import find_hardware
from dflop_jax.record_files import load, save

OnProgress = Callable[[int, int], None]
_SERVES = compiled_probe.__module__
_ROOT = Path(__file__).resolve().parents[2]
# What programs are made of, beside the model: folders and files of this package.
_MADE_OF = ("pipeline", "gpu_compile", "contract.py", "profile/shallow.py")


def compiled_probes(
    config: Config,
    model: MultimodalModel,
    probes: Sequence[Probe],
    on_progress: OnProgress | None = None,
) -> dict[Probe, Found]:
    """What each probe comes to on the chip that `config.plan.hardware` names; one that does not
    compile says so.

    Raises:
      ValueError: the compiler is not installed, or the chip is not described.
    """
    folder = Path(config.cache_dir) / "compiled"
    base = {m: _content(config, model, m) for m in {p.module for p in probes}}
    files = {p: folder / f"{_name(base[p.module], p)}.json" for p in dict.fromkeys(probes)}
    results: dict[Probe, Found] = {}
    for probe, file in files.items():
        with suppress(ValueError):  # not known yet, or of another version
            results[probe] = load(Found, file)
    left = [p for p in files if p not in results]
    if not left:
        return results
    folder.mkdir(parents=True, exist_ok=True)
    setting = Setting(config, max(p.ways for p in left))
    # The dearest first, so that no process is left alone with one at the end.
    left.sort(key=lambda p: (-p.ways, -p.depth, p.module, p.shape))
    for probe, one in _in_processes(setting, left, compiler_environment()):
        results[probe] = one
        if not one.died:  # what memory or a disk was short of may be there next time
            save(one, files[probe])
        if on_progress:
            on_progress(len(results), len(files))
    return results


def _content(config: Config, model: MultimodalModel, module: str) -> bytes:
    """A digest of all that the compiled programs of a module's probes depend on, but the probe:
    sources, sizes, chip, compiler; not the modules beside it."""
    here = _ROOT / "dflop_jax"
    models = {Path(inspect.getfile(type(m))).parent for m in model.modules.values()}
    sources = sorted({f for place in (*(here / name for name in _MADE_OF), *models)
                      for f in ([place] if place.is_file() else place.glob("*.py"))})  # fmt: skip
    facts = (
        [_file_digest(f) for f in sources],
        repr(model.modules[module]),
        [repr(e) for e in edges_of(model) if module in (e.source, e.target)],
        model.piece_tokens.get(module),
        repr(find_hardware(config.plan.hardware)),
        jax.__version__,
        os.environ.get("XLA_FLAGS", ""),
    )
    return hashlib.sha256(msgspec.json.encode(facts)).digest()


@cache
def _file_digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _name(base: bytes, probe: Probe) -> str:
    return hashlib.sha256(base + msgspec.json.encode(probe)).hexdigest()[:24]


def _in_processes(
    setting: Setting, probes: Sequence[Probe], environment: Mapping[str, str]
) -> Iterator[tuple[Probe, Found]]:
    """Answers as they come, of a process for each core."""
    idle: SimpleQueue[Child] = SimpleQueue()

    def ask(probe: Probe) -> tuple[Probe, Found]:
        try:
            compiler = idle.get_nowait()
        except Empty:
            # The experiment's folder comes first, as it does in this process.
            here = [str(Path.cwd())]
            compiler = Child(_SERVES, paths=here, environment=environment, keeps_words=True)
            compiler.tell(msgspec.json.encode(setting))
        compiler.tell(msgspec.json.encode(probe))
        if not (line := compiler.answer()):
            return probe, Found(error=f"the compiler died {compiler.last_words()}", died=True)
        idle.put(compiler)
        return probe, msgspec.json.decode(line, type=Found)

    running: list[Future[tuple[Probe, Found]]] = []
    try:
        with ThreadPoolExecutor(min(os.cpu_count() or 1, len(probes))) as pool:
            try:
                running = [pool.submit(ask, p) for p in probes]
                yield from (done.result() for done in as_completed(running))
            finally:
                for job in running:
                    job.cancel()
    finally:
        while not idle.empty():
            idle.get().end()
