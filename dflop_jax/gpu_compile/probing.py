"""Compiles probes in processes of their own, several at once; what was compiled is kept on disk."""

from __future__ import annotations

import hashlib
import inspect
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from functools import cache
from pathlib import Path
from queue import Empty, SimpleQueue

import jax
import msgspec

from dflop_jax.config import Config
from dflop_jax.contract import MultimodalModel, edges_of
from dflop_jax.gpu_compile.compiling import last_words
from dflop_jax.gpu_compile.probes import Found, Probe, Setting
from dflop_jax.gpu_compile.toolchain import compiler_environment
from dflop_jax.hardware import find_hardware
from dflop_jax.record_files import load, save

OnProgress = Callable[[int, int], None]
_ROOT = Path(__file__).resolve().parents[2]
_START = (
    "import sys; sys.path[:0] = sys.argv[1:]; from dflop_jax.gpu_compile.probes import main; main()"
)
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
    found: dict[Probe, Found] = {}
    for probe, file in files.items():
        with suppress(ValueError):  # not known yet, or of another version
            found[probe] = load(Found, file)
    left = [p for p in files if p not in found]
    if not left:
        return found
    folder.mkdir(parents=True, exist_ok=True)
    setting = Setting(config, max(p.ways for p in left))
    # The dearest first, so that no process is left alone with one at the end.
    left.sort(key=lambda p: (-p.ways, -p.depth, p.module, p.shape))
    for probe, one in _in_processes(setting, left, compiler_environment()):
        found[probe] = one
        if not one.died:  # what memory or a disk was short of may be there next time
            save(one, files[probe])
        if on_progress:
            on_progress(len(found), len(files))
    return found


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
    idle: SimpleQueue[_Compiler] = SimpleQueue()

    def ask(probe: Probe) -> tuple[Probe, Found]:
        try:
            compiler = idle.get_nowait()
        except Empty:
            compiler = _Compiler(setting, environment)
        found = compiler.ask(probe)
        if found is None:
            return probe, Found(error=compiler.end(), died=True)
        idle.put(compiler)
        return probe, found

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


class _Compiler:
    """A process that compiles one probe after another."""

    def __init__(self, setting: Setting, environment: Mapping[str, str]):
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `end`)
        # The experiment's folder comes first, as it does in this process.
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(Path.cwd()), str(_ROOT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said.fileno(),
            env=dict(environment),
        )
        self._write(setting)

    def _write(self, record: Setting | Probe) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # its silence is the answer
            self._process.stdin.write(msgspec.json.encode(record) + b"\n")
            self._process.stdin.flush()

    def ask(self, probe: Probe) -> Found | None:
        """What a probe comes to; None if the process died of it."""
        assert self._process.stdout is not None
        self._write(probe)
        line = self._process.stdout.readline()
        return msgspec.json.decode(line, type=Found) if line else None

    def end(self) -> str:
        """End the process; returns its last words."""
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()
        code = self._process.wait()
        with self._said as said:
            return last_words(said, code)
