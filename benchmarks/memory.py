"""Predicted bytes per device of published models at full size, against XLA's own figures.

Command:  python benchmarks/memory.py [--json FILE] [--only TEXT ...]
Minutes:  about 10
Expected: the first prediction within 5% in all 20 cases; the quick form within 8% of backward
          programs (forward programs hold little beside their arguments, and it says less of them)

Every case is a segment of a published model at full width, as a real program compiled for pretended
CPU devices: nothing is allocated. The compared figure is arguments + outputs + temporaries -
aliased. "2 depths" compiles stacks of 2 and 4 layers a stage and goes on linearly to the segment's
depth; "quick" traces and counts and compiles nothing. On CPU, programs keep bfloat16 activations in
float32, which the quick form is told; "on GPU" is what it says where they take two bytes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from json_rows import Rows, add_json
from rich.console import Console
from rich.table import Table

from dflop_jax.pipeline.flow import device_bytes
from dflop_jax.pipeline.layout import device_mesh
from dflop_jax.pipeline.lowering import Lowering
from dflop_jax.pipeline.parts import PARTS
from dflop_jax.pipeline.segment import EVALUATE, Kind, Segment
from dflop_jax.profile.memory import kept_bytes, temporaries
from dflop_jax.profile.parts import hidden_bytes, part_work
from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    Direction,
    Edge,
    MeshShape,
    Remat,
    SegmentPlan,
    Shape,
    rank_share,
)
from models.audio import AudioModule
from models.decoder import DecoderModule
from models.sizes import AUDIO, DECODERS, LLAVA, VISION
from models.vit import VisionModule

GIB = 2**30
TARGET = 0.05
BF16, FLOAT32 = jnp.dtype("bfloat16"), jnp.dtype("float32")
# What XLA's CPU compiler makes of bfloat16 too, but for casts of all weights at once, which no
# accelerator needs.
SIGLIP = LLAVA["llava-ov-7b"].vision
assert SIGLIP
MODULES: dict[str, Any] = {
    "SigLIP-400M": VisionModule(SIGLIP, 3584, FLOAT32),
    "InternViT-300M": VisionModule(VISION["internvit-300m"], 2048, FLOAT32),
    "Whisper-large-v3": AudioModule(AUDIO["whisper-large-v3"], 4096, FLOAT32),
    "Qwen2.5-7B": DecoderModule(DECODERS["qwen2.5-7b"], FLOAT32),
    "Llama-3-8B": DecoderModule(DECODERS["llama3-8b"], FLOAT32),
}
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


def compiled_bytes(segment: Segment, shape: Shape, kind: Kind) -> ProgramBytes:
    """What XLA says of the segment's program at a per-rank shape; takes a compilation.

    Raises:
      ValueError: the backend has no memory analysis.
    """
    analysis = Lowering(segment).lower(shape, kind).compile().memory_analysis()
    if analysis is None:
        raise ValueError("this backend's compiler gives no memory analysis; use extrapolation")
    return ProgramBytes(
        float(analysis.argument_size_in_bytes),
        float(analysis.output_size_in_bytes),
        float(analysis.temp_size_in_bytes),
        float(analysis.alias_size_in_bytes),
    )


def with_depth(segment: Segment, n_layers: int) -> Segment:
    """The segment with another number of layers."""
    start = segment.plan.start
    return replace(segment, plan=replace(segment.plan, stop=start + n_layers))


def extrapolated_bytes(segment: Segment, shape: Shape, kind: Kind) -> ProgramBytes:
    """`compiled_bytes` of the whole segment, predicted from stacks of 2 and 4 layers a stage."""
    low, high = (
        compiled_bytes(with_depth(segment, d * segment.stages), shape, kind) for d in DEPTHS
    )
    along = (segment.plan.n_layers / segment.stages - DEPTHS[0]) / (DEPTHS[1] - DEPTHS[0])
    pairs = zip(astuple(low), astuple(high), strict=True)
    return ProgramBytes(*(a + (b - a) * along for a, b in pairs))


def quick_bytes(segment: Segment, shape: Shape, kind: Kind, *, half_bytes: int = 2) -> ProgramBytes:
    """`compiled_bytes` without a compiler; all but the temporaries is exact.

    Args:
      half_bytes: what an element of a half-precision activation takes: 2 on accelerators, 4 in
        programs of XLA's CPU compiler.
    """
    lowering = Lowering(segment)
    args, outs = lowering.argument_structs(shape, kind), lowering.output_structs(shape, kind)
    module, ways = segment.module, segment.mesh.shape["model"]
    if kind != BACKWARD:
        most = max(part_work(module, p, FORWARD, shape, ways, half_bytes) for p in segment.parts)
        return ProgramBytes(device_bytes(args), device_bytes(outs), most, 0.0)
    policy: Remat = "none" if segment.plan.remat == "segment" else segment.plan.remat
    quick = temporaries(
        module, shape, ways, policy,
        parts=segment.parts, half_bytes=half_bytes, loss=segment.has_loss,
    )  # fmt: skip
    if not segment.hands_over:  # what forward keeps is there as well
        n, ticks = segment.microbatches, segment.microbatches + segment.stages - 1
        layer, _ = kept_bytes(
            module, shape, ways, policy, half_bytes=half_bytes, loss=segment.has_loss
        )
        # Backward copies what it needs of the microbatch that it is at.
        quick += (n + (ticks > 1)) * layer * segment.plan.n_layers / segment.stages
        share = rank_share(shape.rows, shape.tokens, ways)
        quick += 2 * n * share * hidden_bytes(module, shape, half_bytes)
    return ProgramBytes(device_bytes(args), device_bytes(outs), quick, device_bytes(args[4]))


@dataclass(frozen=True)
class Case:
    """Layers [start, stop) of a module on a mesh, at a per-rank shape."""

    model: str
    layers: tuple[int, int]
    mesh: MeshShape
    shape: Shape
    direction: Direction
    microbatches: int = 1
    remat: bool = False

    @property
    def name(self) -> str:
        """Short and unique."""
        extra = f" M={self.microbatches}" * (self.microbatches > 1) + " remat" * self.remat
        return (
            f"{self.model}[{self.layers[0]}:{self.layers[1]}] {self.mesh.text} "
            f"{self.shape.rows}x{self.shape.tokens} {self.direction}{extra}"
        )

    def segment(self) -> Segment:
        """The real segment on pretended devices."""
        module = MODULES[self.model]
        name = "llm" if isinstance(module, DecoderModule) else "encoder"
        edges = (Edge("encoder", "llm", "visual"),) if name == "llm" else ()
        first, last = self.layers[0] == 0, self.layers[1] == module.n_layers
        remat: Remat = "layers" if self.remat else "none"
        return Segment(
            plan=SegmentPlan(name, name, *self.layers, name, first, last, remat),
            module=module,
            mesh=device_mesh(self.mesh, jax.devices()),
            microbatches=self.microbatches,
            trainable=frozenset(PARTS),
            wants_gradient=frozenset(["hidden"] if not first else [e.name for e in edges]),
            edges=edges,
        )


def _cases() -> tuple[Case, ...]:
    siglip, vit, audio, qwen, llama = MODULES
    tiles, patches = Shape, 729
    return (
        Case(siglip, (0, 26), MeshShape(1, 1, 1), tiles(8, patches), FORWARD),
        Case(siglip, (0, 26), MeshShape(1, 1, 1), tiles(8, patches), BACKWARD),
        Case(siglip, (0, 26), MeshShape(1, 1, 2), tiles(16, patches), BACKWARD),
        Case(siglip, (0, 26), MeshShape(1, 2, 4), tiles(4, patches), BACKWARD),
        Case(siglip, (0, 26), MeshShape(2, 1, 1), tiles(4, patches), BACKWARD, microbatches=2),
        Case(vit, (0, 24), MeshShape(1, 1, 2), tiles(12, 1024), FORWARD),
        Case(vit, (0, 24), MeshShape(1, 1, 1), tiles(12, 1024), BACKWARD),
        Case(vit, (0, 24), MeshShape(2, 1, 2), tiles(6, 1024), BACKWARD, microbatches=2),
        Case(vit, (0, 24), MeshShape(1, 1, 4), tiles(12, 1024), BACKWARD, remat=True),
        Case(audio, (0, 32), MeshShape(1, 1, 1), tiles(2, 1500), FORWARD),
        Case(audio, (0, 32), MeshShape(1, 1, 1), tiles(4, 1500), BACKWARD),
        Case(audio, (0, 32), MeshShape(1, 1, 4), tiles(4, 1500), BACKWARD, remat=True),
        Case(qwen, (0, 28), MeshShape(1, 1, 4), Shape(1, 4096), FORWARD),
        Case(qwen, (0, 28), MeshShape(1, 1, 4), Shape(1, 2048), BACKWARD),
        Case(qwen, (0, 28), MeshShape(1, 1, 4), Shape(1, 8192), BACKWARD, remat=True),
        Case(qwen, (0, 28), MeshShape(2, 1, 2), Shape(1, 2048), BACKWARD, microbatches=2),
        Case(qwen, (14, 28), MeshShape(1, 2, 2), Shape(2, 2048), BACKWARD, remat=True),
        Case(llama, (0, 32), MeshShape(1, 1, 4), Shape(2, 2048), BACKWARD),
        Case(llama, (0, 16), MeshShape(1, 1, 2), Shape(1, 4096), BACKWARD, remat=True),
        Case(llama, (0, 32), MeshShape(2, 1, 2), Shape(1, 4096), FORWARD, microbatches=4),
    )


CASES = _cases()


def measure(case: Case) -> dict[str, Any]:
    """One row: GiB per device as compiled and as predicted, and the predictions' errors."""
    segment, started = case.segment(), time.perf_counter()
    # A forward that ends in a loss is one that asks for it.
    kind = EVALUATE if segment.has_loss and case.direction == FORWARD else case.direction
    compiled = compiled_bytes(segment, case.shape, kind)
    predicted = extrapolated_bytes(segment, case.shape, kind).total
    quick = quick_bytes(segment, case.shape, kind, half_bytes=4).total
    module: Any = segment.module
    in_bf16 = replace(segment, module=replace(module, dtype=BF16))
    on_gpu = quick_bytes(in_bf16, case.shape, kind).total
    return {
        "case": case.name,
        "compiled_gib": compiled.total / GIB,
        "temporaries_gib": compiled.temporaries / GIB,
        "predicted_gib": predicted / GIB,
        "error": predicted / compiled.total - 1,
        "quick_gib": quick / GIB,
        "quick_error": quick / compiled.total - 1,
        "quick_gpu_gib": on_gpu / GIB,
        "seconds": time.perf_counter() - started,
    }


def result(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What is written."""
    worst = max(abs(r["error"]) for r in rows)
    return {"rows": rows, "worst_abs_error": worst, "target": TARGET}


def show(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="GiB per device of programs of published models at full size")
    table.add_column("segment, stage x data x model, rows x tokens")
    for name in ("compiled", "2 depths", "error", "quick", "error", "on GPU", "s"):
        table.add_column(name, justify="right")
    for r in rows:
        table.add_row(
            r["case"],
            f"{r['compiled_gib']:.2f}",
            f"{r['predicted_gib']:.2f}",
            f"{r['error']:+.1%}",
            f"{r['quick_gib']:.2f}",
            f"{r['quick_error']:+.1%}",
            f"{r['quick_gpu_gib']:.2f}",
            f"{r['seconds']:.0f}",
        )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_json(parser)
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name has such a text")
    args = parser.parse_args()
    for text in args.only:
        if not any(text in c.name for c in CASES):
            parser.error(f"--only {text!r} is in no name; such as {CASES[0].name!r}")
    chosen = [c for c in CASES if any(text in c.name for text in args.only)]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    rows = Rows(args.json, result)
    for i, case in enumerate(chosen):
        rows.append(measure(case))
        print(f"{i + 1}/{len(chosen)} {case.name}", file=sys.stderr, flush=True)
    worst = result(rows)["worst_abs_error"]
    Console(width=None if sys.stdout.isatty() else 140).print(show(rows))
    quick = sorted(abs(r["quick_error"]) for r in rows)
    print(
        f"worst error {worst:.1%} (target {TARGET:.0%}); quick form: median "
        f"{quick[len(quick) // 2]:.1%}, worst {quick[-1]:.1%}"
    )
    return 0 if worst <= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
