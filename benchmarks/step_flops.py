"""FLOPs of forward and backward over those needed, by recompute policy, and what each policy keeps.

Command:  python benchmarks/step_flops.py [--json FILE] [--only TEXT ...]
Minutes:  about 5 on 2 cores
Needs:    the extra gpu-compile for sm_90; without it only the CPU's programs are compiled
Expected: 0.99 to 1.03 with none, about 1.33 with segment, for every module on both chips; for loops
          of stages the same times their ticks over their turns: 1.5 for 2 microbatches of 2 stages,
          1.125 for 8, 1.25 for 2 in two rounds

Encoders whole and Qwen2.5-7B up to its last layer but one, so that backward is a task of its own;
bfloat16 at full width and depth, one stage on one device, one microbatch. Then 26 of its layers in
two stages on two devices, as many and 4 times as many microbatches as stages, and 24 in two rounds
through the stages. FLOPs are those of the optimized programs, loops counted as often as they run.
Needed are all products once and their gradients; where attention is a kernel, what a layer's own
gradient has it compute, padding and scores made again included.
Residuals are what forward hands over to backward, temporaries the larger of the two programs'.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, get_args

import jax
from json_rows import Rows, add_json, as_rows
from rich.console import Console
from rich.table import Table

from dflop_jax.config import ModelConfig
from dflop_jax.contract import MultimodalModel, attention_flops_of, chip_of, edges_of, on_chip
from dflop_jax.gpu_compile.child import device_bytes
from dflop_jax.gpu_compile.chips import absent_devices
from dflop_jax.gpu_compile.hlo_cost import hlo_cost
from dflop_jax.gpu_compile.needed import needed_flops, seen_pairs
from dflop_jax.gpu_compile.toolchain import compiler_environment
from dflop_jax.hardware import find_hardware
from dflop_jax.pipeline.layout import device_mesh
from dflop_jax.pipeline.lowering import Lowering
from dflop_jax.pipeline.parts import hidden_struct
from dflop_jax.pipeline.segment import Segment
from dflop_jax.records import BACKWARD, FORWARD, MeshShape, Remat, SegmentPlan, Shape
from dflop_jax.train.prepare import build_model

GIB = 2**30
CHIPS = {"cpu": "", "sm_90": "h100"}


@dataclass(frozen=True)
class Case:
    """A module of a published model at a number of rows, of `tokens` or its pieces' length; `cut`
    of its last layers are left out. It is a loop of `stages`, which `per_stage` microbatches each
    go through in `rounds`."""

    name: str
    factory: str
    size: str
    module: str
    rows: int
    tokens: int = 0
    cut: int = 0
    stages: int = 1
    per_stage: int = 1
    rounds: int = 1

    @property
    def microbatches(self) -> int:
        return self.stages * self.per_stage

    @property
    def ticks_over_needed(self) -> float:
        """What the loop takes over what its microbatches need."""
        turns = self.rounds * self.microbatches
        return (turns + self.stages - 1) / turns

    @property
    def shape(self) -> Shape:
        own = model_of(self.factory, self.size).piece_tokens
        return Shape(self.rows, self.tokens or own[self.module])


CASES = (
    Case("SigLIP", "models.llava:build", "llava-ov-7b", "vision", 8),
    Case("InternViT", "models.internvl:build", "internvl-2.5-4b", "vision", 8),
    Case("Qwen2.5-7B", "models.llava:build", "llava-ov-7b", "llm", 1, tokens=4096, cut=1),
    Case("Whisper", "models.qwen2_audio:build", "qwen2-audio-7b", "audio", 2),
)
_LOOP = replace(CASES[2], name="Qwen2.5-7B loop", cut=2, stages=2)
LOOPS = (_LOOP, replace(_LOOP, per_stage=4), replace(_LOOP, cut=4, rounds=2))


@cache
def model_of(factory: str, size: str) -> MultimodalModel:
    return build_model(ModelConfig(factory=factory, size=size, dtype="bfloat16"))


def make_segment(case: Case, remat: Remat, devices: Sequence[jax.Device]) -> Segment:
    """The module on a device for each stage, all of it trained."""
    model = model_of(case.factory, case.size)
    module = on_chip(model.modules[case.module], chip_of(devices[0]))
    last = not case.cut
    plan = SegmentPlan(
        case.module,
        case.module,
        0,
        module.n_layers - case.cut,
        "one",
        True,
        last,
        remat,
        rounds=case.rounds,
    )
    return Segment(
        plan,
        module,
        device_mesh(MeshShape(stage=case.stages), devices),
        microbatches=case.microbatches,
        trainable=frozenset(("entry", "layers", *(("exit",) if last else ()))),
        edges=tuple(e for e in edges_of(model) if plan.sends(e) or plan.reads(e)),
    )


def kernel_flops(segment: Segment, shape: Shape) -> float:
    """FLOPs of the attention kernels of one layer and its gradient, compiled by themselves."""
    module, here = segment.module, segment.sharding()

    def struct(a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here)

    def gradient(params: Any, h: jax.Array, fields: Any) -> Any:
        out, vjp = jax.vjp(lambda params, h: module.layer(params, h, fields), params, h)
        return out, vjp(out)

    fields = {n: module.field_spec(n, shape.rows, shape.tokens) for n in module.inputs["layers"]}
    params = jax.eval_shape(lambda: module.init("layers", jax.random.key(0)))
    args = jax.tree.map(struct, (params, hidden_struct(segment.module, shape), fields))
    text = jax.jit(gradient).lower(*args).compile().as_text() or ""
    return hlo_cost(text, seen_pairs(module, shape.tokens)).kernel_flops


def measure(case: Case, remat: Remat, devices: Sequence[jax.Device]) -> dict[str, Any]:
    """One row of the table; FLOPs and bytes are a device's."""
    segment = make_segment(case, remat, devices)
    lowering = Lowering(segment)
    seen = seen_pairs(segment.module, case.shape.tokens)
    executed, needed, temp, unknown = 0.0, 0.0, 0, set[str]()
    for kind in (FORWARD, BACKWARD):
        compiled = lowering.lower(case.shape, kind).compile()
        cost = hlo_cost(compiled.as_text() or "", seen)
        executed += cost.flops
        unknown |= {*cost.unknown_kernels, *["a loop"] * bool(cost.unknown_loops)}
        needed += needed_flops(segment, case.shape, kind, with_forward=False)
        analysis: Any = compiled.memory_analysis()
        temp = max(temp, analysis.temp_size_in_bytes)
    attention = attention_flops_of(segment.module)
    if attention and (kernels := kernel_flops(segment, case.shape)):
        by_pairs = 3 * case.shape.rows * attention(case.shape.tokens)
        per_device = segment.plan.n_layers * case.microbatches / case.stages
        needed += per_device * (kernels - by_pairs)
    return {
        "module": case.name,
        "chip": chip_of(devices[0]),
        "recompute": remat,
        "stages": case.stages,
        "microbatches": case.microbatches,
        "rounds": case.rounds,
        "ticks_over_needed": case.ticks_over_needed,
        "executed_over_needed": executed / needed,
        "residual_bytes": device_bytes(lowering.residual_structs(case.shape)),
        "temp_bytes": temp,
        "unknown": sorted(unknown),
    }


def rows_of(chip: str, only: list[str]) -> None:
    """Print a JSON row for each module and policy; in a process that has the chip's compiler."""
    hardware = CHIPS[chip]
    if hardware:
        devices = absent_devices(hardware, find_hardware(hardware), 2)
    else:
        jax.config.update("jax_num_cpu_devices", 2)
        devices = jax.devices()
    jobs = [(case, remat) for case in CASES for remat in get_args(Remat)]
    for case, remat in [*jobs, *((case, "none") for case in LOOPS)]:
        if any(text in f"{case.name} {chip} {remat}" for text in only):
            print(json.dumps(measure(case, remat, devices)), flush=True)


def compiled_rows(chip: str, only: list[str]) -> Iterator[dict[str, Any]]:
    """The rows of a chip, from a process of its own, as they come."""
    command = [sys.executable, __file__, "--chip", chip, "--only", *only]
    environment = compiler_environment() if CHIPS[chip] else None
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
        assert process.stdout is not None
        yield from map(json.loads, process.stdout)
    if process.returncode:
        raise RuntimeError(f"the process that compiles for {chip} ended with {process.returncode}")


def show(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Forward and backward of one group, by recompute policy")
    for name in ("module", "chip", "recompute"):
        table.add_column(name)
    for name in ("stages x\nrounds", "micro-\nbatches", "done/\nneeded", "kept\nGiB", "temp.\nGiB"):
        table.add_column(name, justify="right")
    for r in rows:
        table.add_row(
            r["module"],
            r["chip"],
            r["recompute"],
            f"{r['stages']} x {r['rounds']}",
            str(r["microbatches"]),
            f"{r['executed_over_needed']:.3f}",
            f"{r['residual_bytes'] / GIB:.2f}",
            f"{r['temp_bytes'] / GIB:.2f}",
        )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_json(parser)
    parser.add_argument("--only", nargs="+", default=[""], help="rows that have such a text")
    parser.add_argument("--chip", choices=CHIPS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.chip:
        rows_of(args.chip, args.only)
        return 0
    rows = Rows(args.json, as_rows)
    for chip in CHIPS:
        try:
            for row in compiled_rows(chip, args.only):
                rows.append(row)
        except ValueError as e:
            print(f"{chip} is left out: {e}", file=sys.stderr)
    Console().print(show(rows))
    return int(not all(map(as_expected, rows)))


def as_expected(row: dict[str, Any]) -> bool:
    """Whether a row without recomputation computes what is needed, on every tick of its loop."""
    over = row["executed_over_needed"] / row["ticks_over_needed"]
    return row["recompute"] != "none" or bool(0.99 <= over <= 1.03)


if __name__ == "__main__":
    sys.exit(main())
