"""ModelProfile: times compiled segment programs on the devices at hand, memory from XLA.

Each (module, tensor-parallel degree, per-rank shape) is compiled at two depths; their difference is
one layer and the rest are the ends (the DFLOP Model Profiler's idea, arXiv 2603.25120, on whole
programs, so that casts and the loss are counted as they run). What leaves or enters between layers
is counted with the ends. Programs recompute nothing; what a recompute policy adds follows from
these times and from traces (`recompute`).

Programs run on random values, parameters included (`runtime.synthetic_batch`), and rows are packed
with pieces, without padding. Where a module's attention kernel skips what is not in a piece
(`content_flops_of`), programs are timed with whole rows of one piece and with rows of short ones;
the difference is the cost of content."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import jax
import msgspec
import numpy as np

from dflop_jax.contract import (
    MultimodalModel,
    chip_of,
    content_flops_of,
    content_of,
    edges_of,
    layer_kinds_of,
    on_chip,
)
from dflop_jax.hardware import TASK_HOST_S, hardware_of_kind
from dflop_jax.profile.fit import DEPTHS, fit_nonnegative
from dflop_jax.profile.optimizer_state import parameter_dims
from dflop_jax.profile.recompute import Predictor, edge_fields
from dflop_jax.profile.shallow import shallow_segment, single_kind_module
from dflop_jax.profile.timed_programs import (
    MAX_RUNS,
    TimedPrograms,
    compile_timed_programs,
    median_seconds,
    prepare_backward,
)
from dflop_jax.profile.traced_parts import ENDS, TraceSpec, forward_flops
from dflop_jax.records import (
    BACKWARD,
    LAYERS,
    LayerTiming,
    MeshShape,
    ModelProfile,
    Recompute,
    Shape,
)
from dflop_jax.runtime.lowering import Lowering
from dflop_jax.runtime.synthetic_batch import PIECES_PER_ROW, content_of_rows

# Pieces in a row by which what content costs is told from the rest, and features from each other.
_PIECE_COUNTS = (1, 16, 4, 2, 8)


def profile_key(
    model: MultimodalModel,
    devices: Sequence[jax.Device],
    shapes: Mapping[str, Sequence[Shape]],
    *extra_facts: Any,
) -> str:
    """A digest of what a profile depends on: the model's programs, shapes measured, devices,
    versions and the caller's facts."""
    programs = [
        Lowering(shallow_segment(model, m, 1, devices, MeshShape(), kind=kind))
        .lower(shapes[m][0], BACKWARD)
        .as_text()
        for m, module in model.modules.items()
        for kind in dict.fromkeys(layer_kinds_of(module))
    ]
    facts = (
        programs,
        [f.name for kind in (LayerTiming, Recompute, TimedPrograms) for f in fields(kind)],
        {m: list(content_of(module, 1)) for m, module in model.modules.items()},
        msgspec.to_builtins((shapes, extra_facts)),
        devices[0].platform,
        devices[0].device_kind,
        len(devices),
        TASK_HOST_S,
        jax.__version__,
    )
    return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:16]


def model_profile(
    model: MultimodalModel,
    shapes: Mapping[str, Sequence[Shape]],
    timings: Sequence[LayerTiming],
    devices: Sequence[jax.Device],
    *,
    key: str,
) -> ModelProfile:
    """The profile of measured timings. `concurrency` is the number of devices; see
    `measure_concurrent_rate`."""
    return build_profile(
        model,
        shapes,
        _add_policies(model, timings, devices[0]),
        key=key,
        device=devices[0].device_kind,
        concurrency=float(len(devices)),
        task_overhead_s=_overhead_s(devices[0]),
        priced_by=f"programs timed on {devices[0].device_kind}",
    )


def build_profile(
    model: MultimodalModel,
    shapes: Mapping[str, Sequence[Shape]],
    timings: Sequence[LayerTiming],
    **facts: Any,
) -> ModelProfile:
    """A profile of any timings with the model's sizes; `facts` are fields of `ModelProfile`."""
    modules = model.modules
    ends = {m: [forward_flops(TraceSpec(module, e, shapes[m][-1])) for e in ENDS]
            for m, module in modules.items()}  # fmt: skip
    of_model: dict[str, Any] = {
        **parameter_dims(model),
        "n_layers": {m: module.n_layers for m, module in modules.items()},
        "entry_share": {m: entry / max(entry + exit_, 1.0) for m, (entry, exit_) in ends.items()},
        "host_s": TASK_HOST_S,
        "edges": edges_of(model),
        "tied": tuple(m for m, module in modules.items() if module.tied),
        "piece_tokens": dict(model.piece_tokens),
        "kinds": {m: layer_kinds_of(o) for m, o in modules.items() if hasattr(o, "layer_kinds")},
        "content": {
            m: tuple(content_of(o, 1)) for m, o in modules.items() if hasattr(o, "content")
        },
    }
    return ModelProfile(timings=tuple(timings), **{**of_model, **facts})


def _split_ends(shallow: float, deep: float) -> tuple[float, float]:
    """(seconds of one layer, of both ends) from programs of the two depths."""
    step = DEPTHS[1] - DEPTHS[0]
    # Noise can make the deeper program look faster; a layer never costs less than nothing.
    layer = max(deep - shallow, 0.02 * deep) / step
    return layer, max(shallow - DEPTHS[0] * layer, 0.0)


def _split_content(
    layer_s: Sequence[float], contents: Sequence[Mapping[str, int]], flops: Mapping[str, float]
) -> tuple[float, dict[str, float]]:
    """(seconds without content, seconds of a unit of each feature) of a layer that was timed with
    rows of each content. A feature that no row had is priced by its FLOPs."""
    if not flops:
        return layer_s[0], {}
    names = [name for name in flops if any(c[name] for c in contents)]
    features = [[1, *(c[name] for name in names)] for c in contents]
    static_s, *unit_s = fit_nonnegative(np.array(features, float), np.array(layer_s)).tolist()
    content_s = dict(zip(names, unit_s, strict=True))
    flop_s = sum(unit_s) / max(sum(flops[name] for name in names), 1.0)
    return static_s, {name: content_s.get(name, flop_s * f) for name, f in flops.items()}


def time_layer(
    model: MultimodalModel,
    module: str,
    shape: Shape,
    devices: Sequence[jax.Device],
    *,
    kind: str = LAYERS,
    max_runs: int = MAX_RUNS,
    sync: Callable[[], None] = lambda: None,
) -> LayerTiming:
    """Time a module, with layers of one kind, at a per-rank shape with `devices` as its
    tensor-parallel ranks. `sync` waits for their processes once all is compiled."""
    tp = len(devices)
    timed_module = single_kind_module(on_chip(model.modules[module], chip_of(devices[0])), kind)
    # Rows of one piece each are all alike: their content goes by the shape.
    flops = {} if module in model.piece_tokens else content_flops_of(timed_module)
    piece_counts = _PIECE_COUNTS[: len(flops) + 1] if flops else (PIECES_PER_ROW,)
    row_pieces = [min(n, shape.tokens) for n in piece_counts]
    contents = [content_of_rows(timed_module, shape, n) for n in row_pieces]
    segments = [
        shallow_segment(model, module, d, devices, MeshShape(model=tp), kind=kind) for d in DEPTHS
    ]
    low, high = compile_timed_programs(segments, shape, model.vocab_size, row_pieces)
    by_filling = list(zip(low.runs, high.runs, strict=True))
    runs = [run for depths in by_filling for both in depths for run in both]
    sync()
    seconds = iter(median_seconds(runs, max_runs=max_runs))
    split = []  # forward's and backward's (layer, ends) of each filling
    for _ in by_filling:
        low_f, low_b, high_f, high_b = (next(seconds) for _ in range(4))
        if not low.saves_residuals:
            low_b, high_b = max(low_b - low_f, 0.0), max(high_b - high_f, 0.0)
        split.append((_split_ends(low_f, high_f), _split_ends(low_b, high_b)))
    (_, ends_f), (_, ends_b) = split[0]
    layer_f, content_f = _split_content([f for (f, _), _ in split], contents, flops)
    layer_b, content_b = _split_content([b for _, (b, _) in split], contents, flops)
    layer_temp = max(high.temp_bytes - low.temp_bytes, 0.0) / (DEPTHS[1] - DEPTHS[0])
    layer_residuals = (high.residual_bytes - low.residual_bytes) / (DEPTHS[1] - DEPTHS[0])
    timing = LayerTiming(
        module=module,
        model=tp,
        shape=shape,
        layer_forward_s=layer_f,
        layer_backward_s=layer_b,
        ends_forward_s=ends_f,
        ends_backward_s=ends_b,
        hidden_bytes=low.hidden_bytes,
        content_forward_s=content_f,
        content_backward_s=content_b,
        kind=kind,
    )
    residuals = Recompute(
        # A backward that runs forward itself has what it keeps among its temporaries.
        layer_bytes=layer_residuals if low.saves_residuals else layer_temp,
        temp_bytes=max(low.temp_bytes - DEPTHS[0] * layer_temp, 0.0),
    )
    return replace(timing, recompute={"none": residuals})


def _add_policies(
    model: MultimodalModel, timings: Sequence[LayerTiming], device: jax.Device
) -> list[LayerTiming]:
    """Timings with the costs of every recompute policy."""
    timings_with_policies = []
    for module, kind, tp in dict.fromkeys((t.module, t.kind, t.model) for t in timings):
        predictor = Predictor(
            single_kind_module(on_chip(model.modules[module], chip_of(device)), kind),
            edge_fields(model, module),
            tp,
            hardware_of_kind(device.device_kind),
            half_bytes=4 if device.platform == "cpu" else 2,
        )
        timings_with_policies += predictor.add_policies(
            [t for t in timings if (t.module, t.kind, t.model) == (module, kind, tp)]
        )
    return timings_with_policies


def measure_concurrent_rate(
    model: MultimodalModel, shape: Shape, devices: Sequence[jax.Device]
) -> float:
    """Programs per second of `devices` that all run the same one-layer backward of the last module
    at once, each at `shape`.

    Against the same of one device alone it tells how many devices really compute concurrently:
    fewer than there are where pretended CPU devices share cores.
    """
    last, n = list(model.modules)[-1], len(devices)
    lowering = Lowering(shallow_segment(model, last, 1, devices, MeshShape(data=n)))
    backward = lowering.lower(shape, BACKWARD).compile()
    *_, ((_, run),) = prepare_backward(
        lowering, backward, shape, model.vocab_size, [PIECES_PER_ROW]
    )
    return n / median_seconds([run])[0]


def _overhead_s(device: jax.Device) -> float:
    """Seconds of an awaited call that computes nothing."""
    x = jax.device_put(np.zeros(8, np.float32), jax.sharding.SingleDeviceSharding(device))
    program = jax.jit(lambda a: a + 1).lower(x).compile()
    return median_seconds([lambda: program(x)])[0]
