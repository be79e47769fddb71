"""Compilation of plans, and of probes of modules, for absent chips in separate processes."""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import jax
import msgspec

from dflop_jax.aot.chips import compiler_environment, find_chip
from dflop_jax.aot.reports import CompileReport, describe_fit, device_memory
from dflop_jax.aot.worker import PlanPrograms, Probe, ProbeResult, ProgramReport, Request
from dflop_jax.child_processes import Child
from dflop_jax.config import Config
from dflop_jax.contract import MultimodalModel, edges_of
from dflop_jax.hardware import find_hardware
from dflop_jax.records import Plan
from dflop_jax.records.files import load, save

OnProgress = Callable[[int, int], None]
_PACKAGE = Path(__file__).resolve().parents[1]
# Source files of this package, besides the model's, that programs depend on.
_SOURCES = ("runtime/*.py", "aot/*.py", "contract.py", "profile/shallow.py")


class CompilerDied(RuntimeError):
    """Raised when the compiler process ends without a response; the message has its last output."""


class Compiler:
    """A compiler process, started at the first request and restarted after it has died."""

    def __init__(self) -> None:
        self._environment = compiler_environment()
        self._child: Child | None = None

    def request(self, request: Request) -> bytes:
        """Return the encoded response to a request; CompilerDied: the process ended without one."""
        if self._child is None:
            self._child = Child(
                Request.__module__,
                # The experiment's folder comes first in sys.path, as in this process.
                paths=[str(Path.cwd())],
                environment=self._environment,
                captures_stderr=True,
            )
        self._child.send(msgspec.json.encode(request))
        if not (response := self._child.receive()):
            dead_child, self._child = self._child, None
            raise CompilerDied(f"the compiler died {dead_child.describe_exit()}")
        return response

    def close(self) -> None:
        if self._child is not None:
            self._child.close()


def compile_plan(
    config: Config, plan: Plan, compiler: Compiler, on_progress: OnProgress = lambda *_: None
) -> CompileReport:
    """Compile every program of a plan for the chip `config.plan.hardware`. Equal programs of a
    compiler's plans are compiled once. If the compiler dies, the program's report has the error.

    Raises:
      ValueError: the chip is unknown, or the plan does not match the model or the devices.
      CompilerDied: the compiler died before it compiled a program.
    """
    find_chip(config.plan.hardware)
    request = Request(config, plan)
    plan_programs = msgspec.json.decode(compiler.request(request), type=PlanPrograms)
    if plan_programs.error:
        raise ValueError(plan_programs.error)
    programs: list[ProgramReport] = []
    for i, header in enumerate(plan_programs.programs):
        try:
            response = compiler.request(replace(request, program=i))
            programs.append(msgspec.json.decode(response, type=ProgramReport))
        except CompilerDied as e:
            programs.append(replace(header, error=str(e)))
        on_progress(len(programs), len(plan_programs.programs))
    hardware = find_hardware(config.plan.hardware)
    budget = config.plan.memory_bytes or hardware.usable_bytes
    memory = device_memory(plan_programs.memory, programs, plan.predicted.peak_bytes)
    fits, verdict = describe_fit(hardware.name, budget, memory, programs, plan_programs.memory)
    return CompileReport(
        chip=hardware.name,
        n_devices=plan.layout.n_devices,
        n_nodes=-(-plan.layout.n_devices // hardware.devices_per_node),
        budget_bytes=budget,
        programs=tuple(programs),
        memory=memory,
        fits=fits,
        verdict=verdict,
    )


def compile_probes(
    config: Config,
    model: MultimodalModel,
    probes: Sequence[Probe],
    on_progress: OnProgress = lambda *_: None,
) -> dict[Probe, ProbeResult]:
    """Compile probes for the chip `config.plan.hardware`; results are cached on disk."""
    files = _result_files(config, model, probes)
    results: dict[Probe, ProbeResult] = {}
    for probe, file in files.items():
        with suppress(ValueError):  # the file is missing or has another version
            results[probe] = load(ProbeResult, file)
    if pending := [p for p in files if p not in results]:
        files[pending[0]].parent.mkdir(parents=True, exist_ok=True)
        # Compile the longest first, so that processes finish at about the same time.
        pending.sort(key=lambda p: (-p.tp, -p.depth, p.module, p.shape))
        for probe, result in _compile_in_processes(config, pending):
            results[probe] = result
            if not result.died:  # a lack of memory or disk space may be temporary
                save(result, files[probe])
            on_progress(len(results), len(files))
    return results


def _result_files(
    config: Config, model: MultimodalModel, probes: Sequence[Probe]
) -> dict[Probe, Path]:
    """Return the cache file of each probe's result. Its name is a digest of everything that the
    programs depend on: sources, sizes, chip and compiler, but not the other modules."""
    models = {Path(inspect.getfile(type(m))).parent for m in model.modules.values()}
    sources = [
        *(f for name in _SOURCES for f in _PACKAGE.glob(name)),
        *(f for folder in models for f in folder.glob("*.py")),
    ]
    digest = hashlib.sha256(b"".join(f.read_bytes() for f in sorted(sources))).hexdigest()
    hardware, flags = find_hardware(config.plan.hardware), os.environ.get("XLA_FLAGS", "")
    files = {}
    for probe in probes:
        edges = [e for e in edges_of(model) if probe.module in (e.source, e.target)]
        of_module = model.modules[probe.module], edges, model.piece_tokens.get(probe.module)
        facts = (digest, hardware, jax.__version__, flags), of_module, probe
        name = hashlib.sha256(repr(facts).encode()).hexdigest()[:24]
        files[probe] = Path(config.cache_dir) / "compiled" / f"{name}.json"
    return files


def _compile_in_processes(
    config: Config, probes: Sequence[Probe]
) -> Iterator[tuple[Probe, ProbeResult]]:
    """Compile probes in one process per core; yield results as they arrive."""
    idle: SimpleQueue[Compiler] = SimpleQueue()

    def compile_one(probe: Probe) -> tuple[Probe, ProbeResult]:
        compiler = idle.get()
        try:
            response = compiler.request(Request(config, probe=probe))
            return probe, msgspec.json.decode(response, type=ProbeResult)
        except CompilerDied as e:
            return probe, ProbeResult(error=str(e), died=True)
        finally:
            idle.put(compiler)

    with ExitStack() as stack:
        n_workers = min(os.cpu_count() or 1, len(probes))
        for _ in range(n_workers):
            idle.put(stack.enter_context(closing(Compiler())))
        pool = ThreadPoolExecutor(n_workers)
        stack.callback(pool.shutdown, cancel_futures=True)
        for future in as_completed([pool.submit(compile_one, p) for p in probes]):
            yield future.result()
