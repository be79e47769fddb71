"""The engine's own programs alone, and steps that show where memory goes: parts 1 and 2 of
`benchmarks/gpu_lease.py`."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import median
from typing import Any

import jax
import optax
from gpu_cases import (
    BF16,
    Bench,
    Case,
    Deadline,
    Line,
    Tree,
    attention_cases,
    draw,
    measure,
    memory_bytes,
    packed_row,
    predicted,
    product,
)
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
    Schedule,
    SegmentPlan,
    Shape,
    SubmeshPlan,
)
from dflop_jax.report.memory_growth import fit_growth
from dflop_jax.runtime.calibration import packed_field, runs_by_key, synthetic_groups
from dflop_jax.runtime.compiling import compile_jobs
from dflop_jax.runtime.executor import Executor
from dflop_jax.runtime.initial_state import zero_gradients
from dflop_jax.runtime.layout import device_mesh
from dflop_jax.runtime.lowering import Lowering
from dflop_jax.runtime.programs import Key, Programs
from dflop_jax.runtime.segment import Segment
from dflop_jax.train.memory_log import MemoryLog
from models.composed import PublishedComposition
from models.decoder import DecoderModule
from models.sizes import DECODERS, LLAVA, VISION, DecoderSize, VisionSize
from models.vit import VisionModule

SCALE = 0.05  # of random values


@dataclass(frozen=True)
class Sizes:
    """What parts 1 and 2 measure.

    Attributes:
      model, layers: of the probe, so many layers of each module at full width.
      tiles, rows, tokens: shapes of its groups; steps: of `groups` groups, every other of one more.
      tile_counts, tower, tower_layers: towers in loops and unrolled.
      widths: to which heads of the tower are padded.
      decoder, decoder_layers, row_tokens, sample_tokens: layers of a decoder, over rows of one
        sample and of samples of a median length; small_decoder: of the attention alone, too.
      product: rows and columns of a square product.
    """

    model: str
    layers: int
    tiles: int
    rows: int
    tokens: int
    steps: int
    groups: int
    tile_counts: Sequence[int]
    tower: VisionSize
    tower_layers: int
    widths: Sequence[int]
    small_decoder: DecoderSize
    decoder: DecoderSize
    decoder_layers: int
    row_tokens: int
    sample_tokens: int
    product: int


FULL = Sizes(
    "llava-ov-0.5b", 4, 24, 2, 6656, 40, 5, (24, 27, 32), VISION["siglip-so400m"], 8,
    (72, 80, 96, 128), DECODERS["qwen2.5-0.5b"], DECODERS["qwen2.5-7b"], 4, 8192, 700, 8192,
)  # fmt: skip
TINY = Sizes(
    "nano", 2, 2, 1, 64, 20, 2, (2, 3), VISION["nano"], 2, (8, 16), DECODERS["nano"],
    DECODERS["nano"], 2, 128, 24, 64,
)  # fmt: skip


# ---- programs alone ----


class LoopedSegment(Segment):
    unrolls_layers = False


class UnrolledSegment(Segment):
    unrolls_layers = True


def decoder_segment(bench: Bench, size: DecoderSize, layers: int, *, is_last: bool) -> Segment:
    """Layers of a decoder between two others; or the last ones with the head and the loss, whose
    forward and backward are one task. All are trained."""
    module = on_chip(DecoderModule(replace(size, tied=False), BF16), chip_of(bench.device))
    start = module.n_layers - layers if is_last else min(1, module.n_layers - layers)
    plan = SegmentPlan("llm", "llm", start, start + layers, "one", False, is_last, "none")
    trained = frozenset(("layers", "exit") if is_last else ("layers",))
    return Segment(plan, module, _mesh(bench), 1, trained, frozenset(("hidden",)))


def tower_segment(
    bench: Bench, size: VisionSize, layers: int, width: int, kind: type[Segment]
) -> Segment:
    """A tower of a few layers with both ends, all trained, before an LLM of a width."""
    module = VisionModule(replace(size, n_layers=layers), width, BF16)
    plan = SegmentPlan("vision", "vision", 0, layers, "one", True, True, "none")
    edges = (Edge("vision", "llm", "visual"),)
    trained = frozenset(("entry", "layers", "exit"))
    on_this = on_chip(module, chip_of(bench.device))
    return kind(plan, on_this, _mesh(bench), 1, trained, edges=edges)


def _mesh(bench: Bench) -> Mesh:
    return device_mesh(MeshShape(), [bench.device])


def segment_cases(name: str, segment: Segment, shape: Shape, pieces: int = 1) -> Iterator[Case]:
    """Tasks of a segment over rows of so many equal pieces."""
    start = cache(partial(_start, segment, shape, pieces))
    # Backward needs what forward leaves, whenever its arguments are made.
    forward = cache(partial(Lowering(segment).lower, shape, FORWARD))
    residuals = cache(partial(_residuals, segment, forward, start))
    for kind in (BACKWARD,) if segment.has_loss else (FORWARD, BACKWARD):
        alone = kind == BACKWARD and not segment.saves_residuals
        needed = Shape(shape.rows * pieces, shape.tokens // pieces)
        yield Case(
            {"name": f"{name} {kind}", "rows": shape.rows, "tokens": shape.tokens},
            forward if kind == FORWARD else partial(Lowering(segment).lower, shape, kind),
            start if kind == FORWARD else partial(_arguments, segment, shape, start, residuals),
            flops=segment_flops(segment, needed, kind, with_forward=alone),
            again=_with_gradients if kind == BACKWARD else lambda args, _: args,
            seen_pairs=visible_pair_share(segment.module, shape.tokens) / pieces,
        )


def _start(segment: Segment, shape: Shape, pieces: int) -> tuple[Any, ...]:
    """What forward takes: parameters, hidden states, fields."""
    params, x, fields = Lowering(segment).argument_structs(shape, FORWARD)
    values = {n: packed_field(n, a.shape, a.dtype, pieces, 2) for n, a in fields.items()}
    placed = {n: jax.device_put(values[n], fields[n].sharding) for n in fields}
    return draw(params, SCALE), draw(x, SCALE), placed


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


def _with_gradients(args: tuple[Any, ...], outputs: Any) -> tuple[Any, ...]:
    """The accumulators are donated: those that come out take their place."""
    return (*args[:4], outputs[2], *args[5:])


def programs(bench: Bench, sizes: Sizes, deadline: Deadline) -> Iterator[Line]:
    """Part 2: towers by tiles, layers of a decoder, packed rows by kernel, heads by width."""
    tower, decoder, small = sizes.tower, sizes.decoder, sizes.small_decoder
    yield from measure(bench, [product(bench, sizes.product)], deadline)
    for tiles in sizes.tile_counts:
        cases: list[Case] = []
        for name, kind in (("looped", LoopedSegment), ("unrolled", UnrolledSegment)):
            segment = tower_segment(bench, tower, sizes.tower_layers, small.width, kind)
            shape = Shape(tiles, tower.tokens_in_tower)
            cases += segment_cases(f"tower {tiles} tiles {name}", segment, shape)
        yield from measure(bench, cases, deadline)
        jax.clear_caches()
    row, (_, lengths) = sizes.row_tokens, packed_row(sizes.row_tokens, sizes.sample_tokens)
    inner = decoder_segment(bench, decoder, sizes.decoder_layers, is_last=False)
    last = decoder_segment(bench, decoder, sizes.decoder_layers, is_last=True)
    for name, segment, pieces in (("layers", inner, len(lengths)), ("layers", inner, 1),
                                  ("last layers and head", last, len(lengths))):  # fmt: skip
        text = f"LLM {name}, row of {'one sample' if pieces == 1 else 'samples'}"
        cases = [*segment_cases(text, segment, Shape(1, row), pieces)]
        yield from measure(bench, cases, deadline)
        jax.clear_caches()
    for name, size, rows in (("small LLM", small, sizes.rows), ("LLM", decoder, 1)):
        shape4 = (rows, row, size.n_heads, size.head_dim)
        yield from measure(
            bench,
            attention_cases(
                bench, f"packed {name}", shape4, size.n_kv_heads, lengths, causal=True, checked=True
            ),
            deadline,
        )
    for width in sizes.widths:
        shape4 = (sizes.tile_counts[0], tower.tokens_in_tower, tower.n_heads, width)
        alone = attention_cases(bench, f"tiles {width}", shape4, tower.n_heads, None, causal=False)
        yield from measure(bench, alone, deadline)


# ---- where memory goes ----


def probe_model(sizes: Sizes) -> PublishedComposition:
    whole = LLAVA[sizes.model]
    assert whole.vision is not None
    vision = replace(whole.vision, n_layers=min(sizes.layers, whole.vision.n_layers))
    decoder = replace(whole.decoder, n_layers=sizes.layers)
    return PublishedComposition(replace(whole, vision=vision, decoder=decoder), BF16)


def probe_executor(bench: Bench, sizes: Sizes) -> Executor:
    """Tower and LLM on one device, whole."""
    model = probe_model(sizes)
    shapes = {
        "vision": Shape(sizes.tiles, model.piece_tokens["vision"]),
        "llm": Shape(sizes.rows, sizes.tokens),
    }
    segments = tuple(
        SegmentPlan(name, name, 0, module.n_layers, "one", True, True, "none")
        for name, module in model.modules.items()
    )
    layout = Layout(
        (SubmeshPlan("one", 0, 1, 1, 1),),
        segments,
        (Bucket.from_shapes(shapes),),
        edges=edges_of(model),
        tied=tuple(n for n, m in model.modules.items() if m.tied),
    )
    return Executor(model, Plan("blind", layout), optax.adamw(1e-5), devices=[bench.device])


def leak_probe(
    bench: Bench, sizes: Sizes, deadline: Deadline, variant: str, *, awaits: bool
) -> Iterator[Line]:
    """Part 1: steps without data, profile or search, one dispatched ahead of the other but where
    memory is read. The line of a variant has all readings.

    Args:
      awaits: whether every task is awaited before the next one is dispatched.
    """
    ex = probe_executor(bench, sizes)
    try:
        start_s = time.perf_counter()
        ex.init(0)
        ex.compile()
        ex.one_at_a_time |= awaits
        compile_s = time.perf_counter() - start_s
        line = {"name": variant, "compile_s": compile_s, "groups": sizes.groups}
        yield line | _run_steps(bench, ex, sizes, deadline)
        if not awaits and variant == "base":
            yield from program_lines(bench, ex.programs, _task_ms(ex))
    finally:
        ex.close()


def _run_steps(bench: Bench, ex: Executor, sizes: Sizes, deadline: Deadline) -> Line:
    """Steps in turns of `groups` and `groups` + 1 groups, and readings by step."""
    batches = [make_step(ex, n) for n in (sizes.groups, sizes.groups + 1)]
    log = MemoryLog([bench.device], 0, sizes.steps)
    steps: list[int] = []
    live: list[float | None] = []
    arrays: list[float] = []
    seconds: list[float] = []
    pending, last_s = None, time.perf_counter()
    gc.collect()
    gc.disable()  # so that what Python frees late does not look like a leak
    for k in range(sizes.steps):
        schedule, places = batches[k % 2]
        handle = ex.run_step(schedule, places, {"llm": 1e-5})
        if pending is not None:
            pending.result()
        pending = handle
        del handle
        if (k + 1) % 5 == 0 or k + 1 == sizes.steps:
            pending.result()
            pending = None
            jax.block_until_ready(jax.live_arrays())
            row = log.add(k, [log.read(is_drained=True)])
            steps.append(k)
            live.append(row.get("live_bytes"))
            arrays.append(float(sum(a.nbytes for a in jax.live_arrays())))
            seconds.append((time.perf_counter() - last_s) / 5)
            last_s = time.perf_counter()
            if deadline.is_over:
                break
    gc.enable()
    known = [float("nan") if n is None else n for n in live]
    growth, of_arrays = fit_growth(steps, known), fit_growth(steps, arrays)
    line = {"ms": 1e3 * median(seconds[1:] or seconds), "n_steps": steps[-1] + 1, "steps": steps}
    line |= {"live_bytes": live, "array_bytes": arrays}
    line |= {"slope": growth.bytes_per_step, "slope_error": growth.standard_error}
    line |= {"arrays_slope": of_arrays.bytes_per_step}
    return line | {k: row[k] for k in ("peak_bytes", "peak_bytes_upper_bound") if k in row}


def make_step(ex: Executor, n_groups: int) -> tuple[Schedule, list[Any]]:
    """A schedule whose groups stand in for a batch's, and their arrays."""
    pair, arrays = synthetic_groups(ex.programs, 0)
    n = len(pair)
    groups = [
        replace(g, feeds=tuple(t + n * i for t in g.feeds)) for i in range(n_groups) for g in pair
    ]
    places = [
        replace(a, source_indices={p + n * i: v for p, v in a.source_indices.items()})
        for i in range(n_groups)
        for a in arrays
    ]
    return Schedule(0, tuple(groups)), places


def _task_ms(ex: Executor) -> dict[str, float]:
    """Milliseconds of each task alone, by segment and direction."""
    return {
        f"{key.segment} {key.direction}": 1e3 * median(r.device_s or 0.0 for r in runs)
        for key, runs in runs_by_key(ex.calibrate(3, ends=True)).items()
    }


def program_lines(bench: Bench, programs: Programs, ms: dict[str, float]) -> Iterator[Line]:
    """A line of each program of a plan: what it is predicted to take, and what it took."""
    for key, lower in compile_jobs(programs).items():
        start_s = time.perf_counter()
        program = programs.compiled.get(key) or lower().compile()
        name = f"{key[0]} {_kind(key)}"
        line: Line = {"name": f"probe {name}", "compile_s": time.perf_counter() - start_s}
        line["peak_bytes"] = memory_bytes(program)
        if bench.hardware is not None:
            segment = programs.segments[key[0]]
            tokens = programs.layout.shapes(segment.plan.module)[0].tokens
            seen = visible_pair_share(segment.module, tokens)
            line |= predicted(program, bench.hardware, seen)
        yield line | ({"ms": ms[name]} if name in ms else {})


def _kind(key: Key) -> str:
    names = [k for k in key[1:] if isinstance(k, str)]
    return names[0] if names else "exchange back" if key[-1] else "exchange"
