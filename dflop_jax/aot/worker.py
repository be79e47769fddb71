"""The compiler process: it answers each `Request` line on stdin with a line on stdout.

It is a separate process because JAX reads the compiler's location from the environment at start,
and because the compiler aborts its process on some programs.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import msgspec

from dflop_jax import records
from dflop_jax.aot.chips import absent_devices
from dflop_jax.aot.hlo_cost import program_cost
from dflop_jax.aot.hlo_text import pair_arrays, parse_hlo
from dflop_jax.aot.reports import ProgramReport, SegmentMemory
from dflop_jax.child_processes import open_child_pipes
from dflop_jax.config import Config
from dflop_jax.contract import MultimodalModel
from dflop_jax.profile.kernels import Kernel
from dflop_jax.profile.needed import segment_flops, visible_pair_share
from dflop_jax.profile.shallow import shallow_segment
from dflop_jax.profile.traced_parts import hidden_bytes
from dflop_jax.records import BACKWARD, FORWARD, Plan, Remat, Shape
from dflop_jax.runtime.compiling import compile_jobs, lowering_of, update_lowering
from dflop_jax.runtime.lowering import Lowering
from dflop_jax.runtime.parameter_layout import grad_structs, program_structs
from dflop_jax.runtime.programs import LESS_REMAT, Programs, program_kinds
from dflop_jax.runtime.segment import EVALUATE, device_bytes, field_structs, x_structs
from dflop_jax.simulate.task_graph import SegmentLink, in_flight_limit, submesh_resources
from dflop_jax.train.plan_timer import make_executor
from dflop_jax.train.run_context import make_run_context

Tree = Any


@dataclass(frozen=True)
class Probe:
    """A probe to compile: `depth` layers of one kind of a module at a per-rank shape, with or
    without the module's ends, on one of `tp` tensor ranks."""

    module: str
    tp: int
    shape: Shape
    depth: int
    remat: Remat
    ends: bool = True
    forward: bool = False  # compile the forward program, too
    kind: str = records.LAYERS


@dataclass(frozen=True)
class CompiledProgram:
    """Cost of a compiled program on one device: kernels without the content of attention (see
    `hlo_cost.program_cost`), and bytes in addition to its arguments while it runs."""

    kernels: tuple[Kernel, ...]
    work_bytes: float


@dataclass(frozen=True)
class ProbeResult:
    """The compiled programs of a probe."""

    backward: CompiledProgram | None = None
    forward: CompiledProgram | None = None
    residual_bytes: float = 0.0  # 0 if one program runs forward and backward
    hidden_bytes: float = 0.0
    error: str = ""  # one line, why it does not compile
    died: bool = False  # whether the compiler process died


@dataclass(frozen=True)
class PlanPrograms:
    """A plan's memory and programs before compilation, or the error that rejects the plan."""

    memory: tuple[SegmentMemory, ...] = ()
    programs: tuple[ProgramReport, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class Request:
    """Request for the chip `config.plan.hardware`: compile a probe or a program of a plan; a plan
    without a program index requests its `PlanPrograms`."""

    config: Config
    plan: Plan | None = None
    program: int | None = None  # index in `PlanPrograms.programs`
    probe: Probe | None = None


def main() -> None:
    """Answer requests from stdin until it is closed."""
    requests, responses = open_child_pipes()
    worker = Worker()
    for request_line in requests:
        response = worker.respond(msgspec.json.decode(request_line, type=Request))
        responses.write(msgspec.json.encode(response) + b"\n")
        responses.flush()


class Worker:
    """Handler of requests that caches the last plan's programs and reports of equal programs."""

    def __init__(self) -> None:
        self._config: Config | None = None
        self._plan: Plan | None = None
        self._measured: dict[bytes, dict[str, Any]] = {}
        self._devices = cache(absent_devices)

    def respond(self, request: Request) -> PlanPrograms | ProgramReport | ProbeResult:
        """Return a plan's `PlanPrograms`, the report of one of its programs, or a probe result."""
        try:
            if self._config != request.config:
                self._context = make_run_context(request.config)
                self._config, self._plan = request.config, None
            hardware = self._context.hardware
            assert hardware is not None, "plan.hardware is checked before a process is started"
            if request.probe:
                devices = self._devices(hardware, request.probe.tp)
                return compile_probe(self._context.model, request.probe, devices)
            assert request.plan is not None, "a request has a plan or a probe"
            if self._plan != request.plan:
                devices = self._devices(hardware, request.plan.layout.n_devices)
                context = replace(self._context, devices=devices)
                self._programs = make_executor(context, request.plan).programs
                self._plan = request.plan
        except ValueError as e:
            message = error_line(e)
            return ProbeResult(error=message) if request.probe else PlanPrograms(error=message)
        programs, lowerings = self._programs, compile_jobs(self._programs)
        if request.program is None:
            headers = tuple(program_header(programs, key) for key in lowerings)
            return PlanPrograms(segment_memory(request.plan, programs), headers)
        key, lower = list(lowerings.items())[request.program]
        return compile_program(programs, key, program_header(programs, key), lower, self._measured)


def program_header(programs: Programs, key: Any) -> ProgramReport:
    """Return a program's report before it is compiled: names and submesh."""
    name, *rest = key
    keeping = LESS_REMAT in key
    if isinstance(rest[0], SegmentLink):
        kind, (link, low, high, backward) = "exchange", rest
        field = f" {link.edge.name}" if link.edge else ""
        description = f"to {link.target}{field} {low.name}-{high.name}" + " back" * backward
    else:
        kinds = FORWARD, BACKWARD, EVALUATE, records.REDUCE, records.UPDATE, "sum"
        kind = next(k for k in kinds if k in rest)
        shapes = [k.name for k in rest if isinstance(k, Shape)]
        sizes = ["x".join(map(str, k.shape)) for k in rest if isinstance(k, jax.ShapeDtypeStruct)]
        description = " ".join([kind, *shapes, *sizes, *[LESS_REMAT] * keeping])
    return ProgramReport(
        name=f"{name} {description}",
        segment=name,
        submesh=programs.submesh_of[name],
        kind=kind,
        mesh=tuple(lowering_of(programs, key).segment.mesh.devices.shape),
        keeping=keeping,
    )


def compile_program(
    programs: Programs,
    key: Any,
    header: ProgramReport,
    lower: Callable[[], jax.stages.Lowered],
    reports_by_text: dict[bytes, dict[str, Any]],
) -> ProgramReport:
    """Compile a program and return its report. Results are cached in `reports_by_text` by the
    digest of the program's text."""
    try:
        lowered = lower()
        digest = hashlib.sha256(lowered.as_text().encode()).digest()
        if digest in reports_by_text:
            return replace(header, **reports_by_text[digest])
        start_s = time.perf_counter()
        executable = lowered.compile()
        compile_s = time.perf_counter() - start_s
    except Exception as e:  # the report contains any compile error
        return replace(header, error=error_line(e))
    module, figures = parse_hlo(executable.as_text() or ""), dict[str, Any]()
    needed_flops, visible_share = 0.0, 1.0
    if header.kind in (FORWARD, BACKWARD, EVALUATE):
        lowering = lowering_of(programs, key)
        shape = next(k for k in key if isinstance(k, Shape))
        if header.kind == FORWARD:
            update_lowering(programs, key, executable)
            figures["handed_bytes"] = lowering.residual_bytes(shape)
        runs_forward = FORWARD not in program_kinds(programs, header.segment)
        needed_flops = segment_flops(
            lowering.segment, shape, header.kind, with_forward=runs_forward
        )
        figures["pair_arrays"] = pair_arrays(module, shape.tokens)
        visible_share = visible_pair_share(lowering.segment.module, shape.tokens)
    cost, stats = program_cost(module, visible_share), executable.memory_analysis()
    assert stats is not None, "XLA tells what its programs take"
    loops = [f"{cost.unknown_loops} loops of unknown length"] * bool(cost.unknown_loops)
    figures |= {
        "needed_flops": needed_flops,
        "argument_bytes": float(stats.argument_size_in_bytes),
        "output_bytes": float(stats.output_size_in_bytes),
        "aliased_bytes": float(stats.alias_size_in_bytes),
        "temp_bytes": float(stats.temp_size_in_bytes),
        "flops": cost.flops,
        "executed_over_needed": cost.flops / needed_flops if needed_flops else None,
        "float32_dot_flops": cost.float32_flops,
        "collectives": dict(sorted(cost.collectives.items())),
        "unknown": (*loops, *sorted(cost.unknown_kernels)),
    }
    reports_by_text[digest] = {**figures, "same_as": header.name}
    return replace(header, compile_s=compile_s, **figures)


def segment_memory(plan: Plan, programs: Programs) -> tuple[SegmentMemory, ...]:
    """Return the memory of each segment of a plan on one device."""
    in_flight, resource_of = in_flight_limit(plan), submesh_resources(programs.layout)
    states = []
    for name, segment in programs.segments.items():
        state_structs = [program_structs(segment)]
        shards: Tree = {}
        if update := programs.updates.get(name):
            state_structs += [grad_structs(segment), update.master_structs, update.state_structs]
            shards = update.shard_structs
        shapes = programs.layout.shapes(segment.plan.module)
        inputs = ((x_structs(segment, shape), field_structs(segment, shape)) for shape in shapes)
        states.append(
            SegmentMemory(
                segment=name,
                submesh=programs.submesh_of[name],
                resource=resource_of[programs.submesh_of[name]],
                state_bytes=device_bytes(state_structs),
                input_bytes=max(map(device_bytes, inputs), default=0.0),
                in_flight=in_flight[name] if name in programs.backward else 1,
                shard_bytes=device_bytes(shards),
                remat=segment.plan.remat,
                zero=segment.plan.zero,
            )
        )
    return tuple(states)


def compile_probe(model: MultimodalModel, probe: Probe, devices: list[jax.Device]) -> ProbeResult:
    """Compile a probe's programs and return their costs."""
    try:
        mesh = records.MeshShape(model=probe.tp)
        segment = shallow_segment(
            model,
            probe.module,
            probe.depth,
            devices,
            mesh,
            probe.remat,
            ends=probe.ends,
            kind=probe.kind,
        )
        lowering, forward = Lowering(segment), None
        # If each row is one piece, rows are full and attention's FLOPs are known.
        content = probe.module in model.piece_tokens
        if probe.forward or segment.compiles_forward_first:
            executable = lowering.lower(probe.shape, FORWARD).compile()
            forward = _read_program(executable, content=content)
            if segment.compiles_forward_first:
                lowering.set_residual_shardings(probe.shape, executable)
        backward = lowering.lower(probe.shape, BACKWARD).compile()
        return ProbeResult(
            _read_program(backward, content=content),
            forward,
            lowering.residual_bytes(probe.shape),
            hidden_bytes(segment.module, probe.shape),
        )
    except Exception as e:  # the result contains any compile error
        return ProbeResult(error=error_line(e))


def _read_program(executable: jax.stages.Compiled, *, content: bool) -> CompiledProgram:
    stats = executable.memory_analysis()
    assert stats is not None, "XLA tells what its programs take"
    cost = program_cost(parse_hlo(executable.as_text() or ""), content=content)
    own_bytes = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return CompiledProgram(cost.kernels, float(stats.temp_size_in_bytes + own_bytes))


def error_line(error: BaseException) -> str:
    """Return an error's message as one line of limited length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 400 else f"{text[:400]}..."
