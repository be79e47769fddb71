"""Bytes per device of a segment's programs, from XLA and from a quick analytic form.

`compiled_bytes` asks XLA: the real program is lowered from shapes alone and compiled for the
devices of the segment's mesh, which may be pretended CPU devices, so no weights and no GPU are
needed. `extrapolated_bytes` compiles two shallow stacks and goes on linearly, since layers are
equal. `quick_bytes` traces and counts, for searches.

The compiled figures are those of the backend that compiled. XLA's CPU compiler keeps bfloat16
activations in float32 inside a program, and its buffers are not those of a GPU; arguments and
outputs (parameters, gradients, inputs) are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import jax

from dflop_jax.contract import Module
from dflop_jax.pipeline.segment import AXES, Segment
from dflop_jax.pipeline.spmd_loop import PARTS
from dflop_jax.profile.parts import hidden_bytes, part_kept, part_param_bytes, part_work
from dflop_jax.records import BACKWARD, ModuleShape, SegmentPlan, SubmeshPlan

Tree = Any
DEPTHS = (2, 4)  # layers per stage of the shallow stacks


@dataclass(frozen=True)
class ProgramBytes:
    """Bytes of one program on one device, as XLA's `memory_analysis()` names them; `aliased`
    outputs live in donated arguments."""

    arguments: float
    outputs: float
    temporaries: float
    aliased: float

    @property
    def total(self) -> float:
        return self.arguments + self.outputs + self.temporaries - self.aliased


def compiled_bytes(segment: Segment, shape: ModuleShape, direction: str) -> ProgramBytes:
    """What XLA says of the segment's program at a per-rank shape; takes a compilation.

    Raises:
      ValueError: the backend has no memory analysis.
    """
    found = segment.lower(shape, direction).compile().memory_analysis()
    if found is None:
        raise ValueError("this backend's compiler gives no memory analysis; use extrapolation")
    return ProgramBytes(
        float(found.argument_size_in_bytes),
        float(found.output_size_in_bytes),
        float(found.temp_size_in_bytes),
        float(found.alias_size_in_bytes),
    )


def with_depth(segment: Segment, n_layers: int) -> Segment:
    """The segment with another number of layers."""
    start = segment.plan.start
    return replace(segment, plan=replace(segment.plan, stop=start + n_layers))


def extrapolated_bytes(segment: Segment, shape: ModuleShape, direction: str) -> ProgramBytes:
    """`compiled_bytes` of the whole segment, predicted from stacks of 2 and 4 layers a stage."""
    low, high = (
        compiled_bytes(with_depth(segment, d * segment.stages), shape, direction) for d in DEPTHS
    )
    along = (segment.plan.n_layers / segment.stages - DEPTHS[0]) / (DEPTHS[1] - DEPTHS[0])

    def at(a: float, b: float) -> float:
        return a + (b - a) * along

    return ProgramBytes(
        at(low.arguments, high.arguments),
        at(low.outputs, high.outputs),
        at(low.temporaries, high.temporaries),
        at(low.aliased, high.aliased),
    )


def device_bytes(structs: Tree) -> float:
    """Bytes on one device of a tree of sharded structs."""
    return float(
        sum(
            prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize
            for a in jax.tree.leaves(structs)
        )
    )


@dataclass(frozen=True)
class Work:
    """Temporaries of backward on one device, as `quick_bytes` adds them up.

    Of each layer: `activations` kept (of one microbatch), parameters cast for computing, and
    gradients before they are added up. Once: what is `alive` in the largest layer or end.
    """

    activations: float
    casts: float
    gradients: float
    alive: float

    def temporaries(self, layers: float, ticks: int) -> float:
        """Of a program whose stage has `layers` and whose loop has `ticks`; with more than one,
        a tick's are copied into those of all."""
        copies, casts = (1, 1) if ticks == 1 else (ticks + 1, 2)
        each = self.activations * copies + self.casts * casts + self.gradients
        return layers * each + self.alive


def work_of(
    module: Module,
    shape: ModuleShape,
    ways: int,
    *,
    parts: Sequence[str] = PARTS,
    half_bytes: int = 2,
    remat: bool = False,
) -> Work:
    """Work of a segment that holds `parts` of a module, at a per-rank shape.

    Args:
      ways: tensor-parallel degree.
      half_bytes: as for `quick_bytes`.
      remat: whether a layer keeps its input only.
    """
    size = partial(part_param_bytes, module, ways=ways)
    alive = {p: part_work(module, p, BACKWARD, shape, ways, half_bytes) for p in parts}
    # The exit comes first; its gradients stay until they are added up.
    alive["layers"] += size("exit") if "exit" in parts else 0.0
    most = max(alive.values()) + (size("entry") if "entry" in parts else 0.0)
    if remat:
        return Work(hidden_bytes(module, shape, half_bytes), 0.0, size("layers"), most)
    kept = part_kept(module, "layers", shape, ways, half_bytes)
    return Work(kept.activations, kept.parameters, size("layers"), most)


def quick_bytes(
    segment: Segment, shape: ModuleShape, direction: str, *, half_bytes: int = 2
) -> ProgramBytes:
    """`compiled_bytes` without a compiler; all but the temporaries is exact.

    Args:
      half_bytes: what an element of a half-precision activation takes: 2 on accelerators, 4 in
        programs of XLA's CPU compiler.
    """
    args = segment.argument_structs(shape, direction)
    outs = segment.output_structs(shape, direction)
    module, ways = segment.module, segment.mesh.shape["model"]
    if direction != BACKWARD:
        most = max(part_work(module, p, direction, shape, ways, half_bytes) for p in segment.parts)
        return ProgramBytes(device_bytes(args), device_bytes(outs), most, 0.0)
    work = work_of(
        module,
        shape,
        ways,
        parts=segment.parts,
        half_bytes=half_bytes,
        remat=segment.plan.remat != "none",
    )
    ticks = segment.microbatches + segment.stages - 1
    temporaries = work.temporaries(segment.plan.n_layers / segment.stages, ticks)
    return ProgramBytes(device_bytes(args), device_bytes(outs), temporaries, device_bytes(args[4]))


@dataclass(frozen=True)
class SegmentBytes:
    """Bytes of a segment on one device during a step; `optimizer` is AdamW's two moments, sharded
    over the data axis, `kept` what forward leaves for backward."""

    parameters: float
    gradients: float
    optimizer: float
    kept: float
    temporaries: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.kept + self.temporaries


def segment_bytes(
    segment: Segment,
    shapes: Iterable[ModuleShape],
    in_flight: int,
    *,
    program: Callable[[Segment, ModuleShape, str], ProgramBytes] = quick_bytes,
) -> SegmentBytes:
    """Most bytes of a segment over a plan's buckets.

    Args:
      shapes: the module's per-rank shape in every bucket; those without items cost nothing.
      in_flight: groups that may be forwarded but not yet run backward.
      program: where temporaries come from, one of the three functions above.
    """
    state = segment.placed_structs()
    trained = device_bytes({p: state[p] for p in segment.parts if p in segment.trainable})
    kept = work = 0.0
    for shape in shapes:
        if shape.items == 0:
            continue
        inputs = device_bytes((segment.x_structs(shape), segment.field_structs(shape)))
        found = program(segment, shape, BACKWARD)
        moved = found.temporaries + found.outputs - found.aliased
        if inputs * in_flight + moved > kept + work:
            kept, work = inputs * in_flight, moved
    return SegmentBytes(
        parameters=device_bytes(state),
        gradients=device_bytes(segment.grad_structs()),
        optimizer=2 * trained / segment.data_ranks,
        kept=kept,
        temporaries=work,
    )


def abstract_segment(
    module: Module,
    plan: SegmentPlan,
    submesh: SubmeshPlan,
    *,
    microbatches: int = 1,
    trainable: Iterable[str] = PARTS,
    sends_gradient: bool = True,
) -> Segment:
    """A segment on devices that are not at hand: enough for `quick_bytes` and `segment_bytes`."""
    mesh: Any = jax.sharding.AbstractMesh(submesh.shape, AXES)
    return Segment(
        plan=plan,
        module=module,
        mesh=mesh,
        microbatches=microbatches,
        trainable=frozenset(trainable),
        sends_gradient=sends_gradient,
    )
