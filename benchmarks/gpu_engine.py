"""The engine's own programs, and whole steps: cases of `benchmarks/gpu_step.py`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import optax
from gpu_cases import BF16, Bench, Case, Deadline, Line, Tree, draw, predicted
from jax.sharding import Mesh

from dflop_jax.contract import chip_of, edges_of, on_chip
from dflop_jax.profile.needed import segment_flops, visible_pair_share
from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    Bucket,
    Edge,
    Layout,
    MeshShape,
    Plan,
    Remat,
    Schedule,
    SegmentPlan,
    Shape,
    SubmeshPlan,
)
from dflop_jax.runtime.calibration import packed_field, runs_by_key, synthetic_groups
from dflop_jax.runtime.compiling import compile_jobs
from dflop_jax.runtime.executor import Executor
from dflop_jax.runtime.initial_state import zero_gradients
from dflop_jax.runtime.layout import device_mesh
from dflop_jax.runtime.lowering import Lowering
from dflop_jax.runtime.programs import make_programs
from dflop_jax.runtime.segment import Segment
from models.decoder import DecoderModule
from models.llava import build
from models.sizes import DecoderSize, VisionSize
from models.vit import VisionModule

PIECES = 1  # of a row, as FLOPs and predictions count them
SCALE = 0.05  # of random values
SegmentOf = Callable[[Remat], Segment]


# ---- segments ----


def inner_segment(bench: Bench, size: DecoderSize, layers: int, remat: Remat) -> Segment:
    """Layers of a decoder between two others, all trained."""
    module = on_chip(DecoderModule(size, BF16), chip_of(bench.device))
    plan = SegmentPlan("llm", "llm", 1, 1 + layers, "one", False, False, remat)
    return Segment(plan, module, _mesh(bench), 1, frozenset(("layers",)), frozenset(("hidden",)))


def last_segment(bench: Bench, size: DecoderSize, layers: int, remat: Remat) -> Segment:
    """The last layers of a decoder, its head and the loss; forward and backward are one task."""
    module = on_chip(DecoderModule(replace(size, tied=False), BF16), chip_of(bench.device))
    n = module.n_layers
    plan = SegmentPlan("llm", "llm", n - layers, n, "one", False, True, remat)
    trained = frozenset(("layers", "exit"))
    return Segment(plan, module, _mesh(bench), 1, trained, frozenset(("hidden",)))


def encoder_segment(
    bench: Bench, size: VisionSize, layers: int, width: int, remat: Remat
) -> Segment:
    """An encoder of a few layers with both ends, all trained, before an LLM of a width."""
    module = VisionModule(replace(size, n_layers=layers), width, BF16)
    plan = SegmentPlan("vision", "vision", 0, layers, "one", True, True, remat)
    edges = (Edge("vision", "llm", "visual"),)
    trained = frozenset(("entry", "layers", "exit"))
    chip = chip_of(bench.device)
    return Segment(plan, on_chip(module, chip), _mesh(bench), 1, trained, edges=edges)


def _mesh(bench: Bench) -> Mesh:
    return device_mesh(MeshShape(), [bench.device])


def segment_cases(
    bench: Bench, what: str, make: SegmentOf, shape: Shape, remats: Sequence[Remat]
) -> Iterator[Case]:
    """Tasks of a segment under recompute policies."""
    # Parameters and inputs are the same under every policy.
    start = cache(partial(_start, make("none"), shape))
    for remat in remats:
        segment = make(remat)
        # Backward needs what forward leaves, whenever its arguments are made.
        forward = cache(partial(Lowering(segment).lower, shape, FORWARD))
        residuals = cache(partial(_residuals, segment, forward, start))
        kinds = (BACKWARD,) if segment.has_loss else (FORWARD, BACKWARD)
        for kind in kinds:
            alone = kind == BACKWARD and not segment.saves_residuals
            yield Case(
                {"name": f"segment {kind}", "of": what, "layers": segment.plan.n_layers,
                 "rows": shape.rows, "tokens": shape.tokens, "remat": remat,
                 "unrolled": segment.unrolls_layers},
                forward if kind == FORWARD else partial(Lowering(segment).lower, shape, kind),
                start if kind == FORWARD else partial(_arguments, segment, shape, start, residuals),
                flops=segment_flops(segment, shape, kind, with_forward=alone),
                again=_with_gradients if kind == BACKWARD else lambda args, _: args,
                seen_pairs=visible_pair_share(segment.module, shape.tokens),
            )  # fmt: skip


def _start(segment: Segment, shape: Shape) -> tuple[Any, ...]:
    """What forward takes: parameters, hidden states, fields."""
    params, x, fields = Lowering(segment).argument_structs(shape, FORWARD)
    return draw(params, SCALE), draw(x, SCALE), _fields(fields)


def _residuals(
    segment: Segment,
    forward: Callable[[], jax.stages.Lowered],
    start: Callable[[], tuple[Any, ...]],
) -> Tree:
    return forward().compile()(*start())["residuals"] if segment.saves_residuals else {}


def _arguments(
    segment: Segment,
    shape: Shape,
    start: Callable[[], tuple[Any, ...]],
    residuals: Callable[[], Tree],
) -> tuple[Any, ...]:
    """What backward takes."""
    dy = draw(Lowering(segment).argument_structs(shape, BACKWARD)[3], SCALE)
    return (*start(), dy, zero_gradients(segment), residuals())


def _fields(structs: Tree) -> Tree:
    values = {n: packed_field(n, a.shape, a.dtype, PIECES, 2) for n, a in structs.items()}
    return {n: jax.device_put(values[n], structs[n].sharding) for n in structs}


def _with_gradients(args: tuple[Any, ...], outputs: Any) -> tuple[Any, ...]:
    """The accumulators are donated: those that come out take their place."""
    return (*args[:4], outputs[2], *args[5:])


# ---- whole steps of a model ----


def step_plan(model: Any, tiles: int, tokens: int) -> Plan:
    """Encoder and LLM on one device, whole."""
    modules = model.modules
    shapes = {"vision": Shape(tiles, model.piece_tokens["vision"]), "llm": Shape(1, tokens)}
    segments = [
        SegmentPlan(name, name, 0, modules[name].n_layers, "one", True, True, "none")
        for name in ("vision", "llm")
    ]
    return Plan(
        "blind",
        Layout(
            (SubmeshPlan("one", 0, 1, 1, 1),),
            tuple(segments),
            (Bucket.from_shapes(shapes),),
            edges=edges_of(model),
            tied=tuple(n for n, m in modules.items() if m.tied),
        ),
    )


def step_programs(bench: Bench, size: str, tiles: int, tokens: int) -> Iterator[Line]:
    """Every program of such a plan, compiled."""
    model = build(size, "bfloat16")
    layout, tx = step_plan(model, tiles, tokens).layout, optax.adamw(1e-5)
    programs = make_programs(model, layout, [bench.device], tx, clip_norm=1.0)
    for key, lower in compile_jobs(programs).items():
        start = time.perf_counter()
        program = lower().compile()
        line: Line = {"name": f"program {key[0]} {_kind(key)}"}
        line["compile_s"] = time.perf_counter() - start
        if bench.hardware is not None:
            tokens_here = tokens if key[0] == "llm" else model.piece_tokens["vision"]
            seen = visible_pair_share(programs.segments[key[0]].module, tokens_here)
            line |= predicted(program, bench.hardware, seen, 0.0)
        yield line


def _kind(key: tuple[Any, ...]) -> str:
    names = [k for k in key[1:] if isinstance(k, str)]
    return names[0] if names else "exchange back" if key[-1] else "exchange"


def whole_steps(
    bench: Bench, size: str, tiles: int, tokens: int, groups: int, folder: Path, deadline: Deadline
) -> Iterator[Line]:
    """Tasks alone, then steps of some groups one after another, then the trace of two steps."""
    model = build(size, "bfloat16")
    plan = step_plan(model, tiles, tokens)
    ex = Executor(model, plan, optax.adamw(1e-5), devices=[bench.device])
    try:
        start = time.perf_counter()
        ex.init(0)
        n = ex.compile()
        yield {"name": "step compile", "programs": n, "compile_s": time.perf_counter() - start}
        for key, runs in runs_by_key(ex.calibrate(3, ends=True)).items():
            ms = [1e3 * (r.device_s or 0.0) for r in runs]
            what = f"task {key.segment} {key.direction}"
            yield {"name": what, "ms": median(ms), "ms_p10": min(ms), "ms_p90": max(ms)}
        step = _Step(ex, groups)
        yield step.timed(bench, deadline)
        folder.mkdir(parents=True, exist_ok=True)
        with jax.profiler.trace(folder):
            step.run()
            step.run()
        yield {"name": "trace", "folder": str(folder), **device_gaps(folder)}
    finally:
        ex.close()


class _Step:
    """A step whose groups stand in for a batch's."""

    def __init__(self, ex: Executor, groups: int):
        self._ex, self._groups = ex, groups
        pair, arrays = synthetic_groups(ex.programs, 0)
        copies = [
            replace(g, feeds=tuple(t + len(pair) * i for t in g.feeds))
            for i in range(groups)
            for g in pair
        ]
        places = [
            replace(a, source_indices={p + len(pair) * i: v for p, v in a.source_indices.items()})
            for i in range(groups)
            for a in arrays
        ]
        self._schedule, self._arrays = Schedule(0, tuple(copies)), places
        weights = [a.fields["weights"] for a in arrays if "weights" in a.fields]
        self._scales = {"llm": 1.0 / sum(w.sum() for w in weights) / groups}

    def run(self) -> tuple[float, float]:
        """(seconds until it was dispatched, until it was done)."""
        start = time.perf_counter()
        handle = self._ex.run_step(self._schedule, self._arrays, self._scales)
        dispatched = time.perf_counter() - start
        handle.result()
        return dispatched, time.perf_counter() - start

    def timed(self, bench: Bench, deadline: Deadline) -> Line:
        """Tokens per second, needed FLOPs of the peak, and what dispatch takes."""
        self.run()
        runs = [self.run()]
        while len(runs) < bench.rounds and not deadline.is_over:
            runs.append(self.run())
        dispatch, whole = (median(column) for column in zip(*runs, strict=True))
        plan, segments = self._ex.plan, self._ex.programs.segments
        flops = sum(
            segment_flops(s, plan.layout.shapes(n)[0], kind, with_forward=False)
            for n, s in segments.items()
            for kind in (FORWARD, BACKWARD)
        )
        tokens = plan.layout.shapes("llm")[0].tokens
        line = {
            "name": "step",
            "groups": self._groups,
            "ms": 1e3 * whole,
            "dispatch_ms": 1e3 * dispatch,
            "tokens_per_s": self._groups * tokens / whole,
            "tflops": self._groups * flops / whole / 1e12,
        }
        if bench.hardware is not None:
            line["mfu"] = self._groups * flops / whole / bench.hardware.bfloat16_flops
        return line


def device_gaps(folder: Path) -> Line:
    """Of the GPU in a trace: from its first kernel to its last, the share in which none ran, and
    the longest such gap."""
    spans: list[tuple[float, float]] = []
    for file in sorted(folder.rglob("*.xplane.pb")):
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            if plane.name.startswith("/device:GPU"):
                spans += [
                    (e.start_ns, e.start_ns + e.duration_ns)
                    for line in plane.lines
                    if line.name.startswith("Stream")
                    for e in line.events
                ]
    return gaps(spans)


def gaps(spans: Sequence[tuple[float, float]]) -> Line:
    """See `device_gaps`; nanoseconds in, {} where there is no span."""
    if not spans:
        return {}
    ordered = sorted(spans)
    end, idle = ordered[0][1], [0.0]
    for start, stop in ordered[1:]:
        idle.append(max(0.0, start - end))
        end = max(end, stop)
    whole = end - ordered[0][0]
    return {"ms": whole / 1e6, "idle": sum(idle) / whole, "longest_gap_ms": max(idle) / 1e6}
