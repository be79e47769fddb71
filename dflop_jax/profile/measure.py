"""ModelProfile: times compiled segment programs on the devices at hand, memory from XLA.

Each (module, tensor-parallel degree, per-rank shape) is compiled at two depths; their difference is
one layer and the rest are the ends (the DFLOP Model Profiler's idea, arXiv 2603.25120, on whole
programs, so that recomputation, casts and the loss are counted as they run).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import msgspec
import numpy as np
from jax.sharding import Mesh

from dflop_jax.contract import MultimodalModel
from dflop_jax.pipeline.communicator import zeros
from dflop_jax.pipeline.segment import AXES, Segment
from dflop_jax.pipeline.spmd_loop import PARTS
from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    LayerTiming,
    ModelProfile,
    ModuleShape,
    SegmentPlan,
)

Progress = Callable[[int, int], None]
_DEPTHS = (1, 3)


@dataclass(frozen=True)
class _Measured:
    forward_s: float
    backward_s: float
    temp_bytes: float
    hidden_bytes: float


def profile_key(
    model: MultimodalModel,
    devices: Sequence[jax.Device],
    shapes: Mapping[str, Sequence[ModuleShape]],
    *more: Any,
) -> str:
    """Names what a profile depends on: the model's programs, shapes measured, devices, versions
    and what else the caller says."""
    programs = [
        _segment(model, m, 1, devices, (1, 1, 1)).lower(shapes[m][0], BACKWARD).as_text()
        for m in model.modules
    ]
    facts = (
        programs,
        msgspec.to_builtins((shapes, more)),
        devices[0].platform,
        devices[0].device_kind,
        len(devices),
        jax.__version__,
    )
    return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:16]


def time_layers(
    model: MultimodalModel,
    shapes: Mapping[str, Sequence[ModuleShape]],
    model_degrees: Sequence[int],
    devices: Sequence[jax.Device],
    *,
    share: tuple[int, int] = (0, 1),
    repeats: int = 3,
    on_progress: Progress | None = None,
) -> list[LayerTiming]:
    """Time every module at its per-rank `shapes` and each tensor-parallel degree.

    Degrees that a module's sizes do not divide by are left out. `share` (i, n): only the i-th of n
    parts of the work, for one of n processes that measure on devices of their own.
    """
    jobs = [(m, tp, shape) for m in model.modules for tp in model_degrees for shape in shapes[m]]
    jobs = jobs[share[0] :: share[1]]
    timings: list[LayerTiming] = []
    undivided: set[tuple[str, int]] = set()
    for i, (module, tp, shape) in enumerate(jobs):
        if (module, tp) not in undivided:
            try:
                timings.append(_time_layer(model, module, shape, devices, tp, repeats))
            except ValueError:  # the segment says that a dim does not divide over the degree
                if tp == 1:
                    raise
                undivided.add((module, tp))
        if on_progress:
            on_progress(i + 1, len(jobs))
    return timings


def model_profile(
    model: MultimodalModel,
    shapes: Mapping[str, Sequence[ModuleShape]],
    timings: Sequence[LayerTiming],
    devices: Sequence[jax.Device],
    *,
    key: str,
) -> ModelProfile:
    """The profile that timings make. `concurrency` is the number of devices; see `together`."""
    return assembled(
        model,
        shapes,
        timings,
        key=key,
        device=devices[0].device_kind,
        concurrency=float(len(devices)),
        task_overhead_s=_overhead_s(devices[0]),
    )


def assembled(
    model: MultimodalModel,
    shapes: Mapping[str, Sequence[ModuleShape]],
    timings: Sequence[LayerTiming],
    *,
    key: str,
    device: str,
    concurrency: float,
    task_overhead_s: float,
) -> ModelProfile:
    """A profile of timings from anywhere, with the model's sizes."""
    layer_bytes, ends_bytes, entry_share = {}, {}, {}
    for name, spec in model.modules.items():
        entry, exit_ = (
            spec.flops(p, shapes[name][-1].items, shapes[name][-1].tokens)
            for p in ("entry", "exit")
        )
        entry_share[name] = entry / max(entry + exit_, 1.0)
        sizes = {
            p: _nbytes(jax.eval_shape(partial(spec.init, p), jax.random.key(0))) for p in PARTS
        }
        layer_bytes[name] = sizes["layers"]
        ends_bytes[name] = sizes["entry"] + sizes["exit"]
    return ModelProfile(
        key=key,
        device=device,
        timings=tuple(timings),
        layer_param_bytes=layer_bytes,
        ends_param_bytes=ends_bytes,
        n_layers={n: m.n_layers for n, m in model.modules.items()},
        entry_share=entry_share,
        item_tokens=dict(model.item_tokens),
        concurrency=concurrency,
        task_overhead_s=task_overhead_s,
    )


def time_s(run: Callable[[], Any], repeats: int) -> float:
    """Least seconds of `repeats` awaited calls, after one to warm up."""
    jax.block_until_ready(run())
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        best = min(best, time.perf_counter() - start)
    return best


def _nbytes(tree: Any) -> int:
    return sum(prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(tree))


def _segment(
    model: MultimodalModel,
    module: str,
    depth: int,
    devices: Sequence[jax.Device],
    mesh_shape: tuple[int, int, int],
) -> Segment:
    return Segment(
        plan=SegmentPlan(module, module, 0, depth, module, True, True),
        module=model.modules[module],
        mesh=Mesh(np.array(devices[: prod(mesh_shape)]).reshape(mesh_shape), AXES),
        microbatches=1,
        trainable=frozenset(PARTS),
        sends_gradient=True,
    )


def _measure(segment: Segment, shape: ModuleShape, repeats: int) -> _Measured:
    structs = segment.argument_structs(shape, BACKWARD)
    forward = segment.lower(shape, FORWARD).compile()
    backward = segment.lower(shape, BACKWARD).compile()
    params, x, fields, dy, grads = jax.tree.map(zeros, structs)
    forward_s = time_s(lambda: forward(params, x, fields), repeats)
    held = [grads]  # donated by each call, and given back

    def run_backward() -> Any:
        _, dx, held[0], done = backward(params, x, fields, dy, held[0])
        return dx, done

    backward_s = time_s(run_backward, repeats)
    temp = getattr(backward.memory_analysis(), "temp_size_in_bytes", 0)
    hidden = segment.hidden_struct(shape)
    return _Measured(forward_s, backward_s, float(temp), _nbytes(hidden))


def _time_layer(
    model: MultimodalModel,
    module: str,
    shape: ModuleShape,
    devices: Sequence[jax.Device],
    tp: int,
    repeats: int,
) -> LayerTiming:
    low, high = (
        _measure(_segment(model, module, d, devices, (1, 1, tp)), shape, repeats) for d in _DEPTHS
    )
    step = _DEPTHS[1] - _DEPTHS[0]

    def split(shallow: float, deep: float) -> tuple[float, float]:
        # Noise can make the deeper program look faster; a layer never costs less than nothing.
        layer = max(deep - shallow, 0.02 * deep) / step
        return layer, max(shallow - _DEPTHS[0] * layer, 0.0)

    layer_f, ends_f = split(low.forward_s, high.forward_s)
    layer_b, ends_b = split(low.backward_s, high.backward_s)
    layer_m = max(high.temp_bytes - low.temp_bytes, 0.0) / step
    ends_m = max(low.temp_bytes - _DEPTHS[0] * layer_m, 0.0)
    return LayerTiming(
        module,
        tp,
        shape,
        layer_f,
        layer_b,
        ends_f,
        ends_b,
        layer_m,
        ends_m,
        low.hidden_bytes,
    )


def together(
    model: MultimodalModel, shape: ModuleShape, devices: Sequence[jax.Device], repeats: int = 3
) -> float:
    """Programs per second of `devices` that all run the same one-layer LLM backward at once.

    Against the same of one device alone it tells how many devices really compute concurrently:
    fewer than there are where pretended CPU devices share cores.
    """
    n = len(devices)
    return n / _measure(_segment(model, "llm", 1, devices, (1, n, 1)), shape, repeats).backward_s


def _overhead_s(device: jax.Device) -> float:
    """Seconds of an awaited call that computes nothing."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    x = jax.device_put(np.zeros(8, np.float32), sharding)
    program = jax.jit(lambda a: a + 1).lower(x).compile()
    return time_s(lambda: program(x), 20)
