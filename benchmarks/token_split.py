"""What tensor ranks keep and move of hidden states, in programs for a GPU that is not here.

Command:  python benchmarks/token_split.py [--json FILE]
Minutes:  about 3 on 2 cores
Needs:    the extra gpu-compile
Expected: the degree's share of hidden states (1/2, 1/4) between layers; a layer's visit gathers or
          scatters them 4 times forward and 6 times backward, and nothing else is gathered over
          tensor ranks; products as often as without tensor parallelism

Four layers of Qwen2.5-7B in bfloat16 on 2 stages x 2 data x 2 or 4 tensor ranks, rows of 4,096
tokens, a microbatch a stage, so three ticks for two microbatches: 1.5 times the FLOPs that are
needed forward. `hidden_bytes` are those of the hidden states that forward hands to backward, on one
device, `whole_bytes` if each tensor rank had all tokens. Collectives and their bytes are of one run
on one device.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from json_rows import Rows, add_json, as_rows
from rich.console import Console
from rich.table import Table

from dflop_jax.contract import on_chip
from dflop_jax.gpu_compile.child import device_bytes
from dflop_jax.gpu_compile.chips import absent_devices
from dflop_jax.gpu_compile.hlo_cost import hlo_cost
from dflop_jax.gpu_compile.hlo_gathers import parameter_gathers
from dflop_jax.gpu_compile.hlo_kernels import hlo_kernels
from dflop_jax.gpu_compile.needed import needed_flops, seen_pairs
from dflop_jax.gpu_compile.toolchain import compiler_environment
from dflop_jax.hardware import find_hardware
from dflop_jax.pipeline.layout import device_mesh
from dflop_jax.pipeline.lowering import Lowering
from dflop_jax.pipeline.parts import hidden_struct
from dflop_jax.pipeline.segment import Segment
from dflop_jax.profile.kernels import GATHER
from dflop_jax.records import BACKWARD, FORWARD, Direction, MeshShape, SegmentPlan, Shape
from models.decoder import DecoderModule
from models.sizes import DECODERS

MIB = 2**20
CHIP, DEGREES, STAGES, DATA = "h100", (2, 4), 2, 2
LAYERS, SHAPE = (4, 8), Shape(1, 4096)
# Before and after attention and the MLP; backward gathers gradients, and what both read again.
NEEDED = {FORWARD: 4, BACKWARD: 6}


def make_segment(tensor: int) -> Segment:
    """Layers between others, all of them trained."""
    hardware, mesh = find_hardware(CHIP), MeshShape(STAGES, DATA, tensor)
    module = on_chip(DecoderModule(DECODERS["qwen2.5-7b"], jnp.dtype("bfloat16")), hardware.chip)
    devices = absent_devices(CHIP, hardware, mesh.n_devices)
    return Segment(
        SegmentPlan("llm", "llm", *LAYERS, "llm", False, False),
        module,
        device_mesh(mesh, devices),
        microbatches=STAGES,
        trainable=frozenset(["layers"]),
        wants_gradient=frozenset(["hidden"]),
    )


def measure(tensor: int) -> Iterator[dict[str, Any]]:
    """A row of each program."""
    segment = make_segment(tensor)
    lowering = Lowering(segment)
    hidden = hidden_struct(segment.module, SHAPE)
    visits = (LAYERS[1] - LAYERS[0]) // STAGES * (2 * STAGES - 1)
    directions: tuple[Direction, ...] = (FORWARD, BACKWARD)
    for direction in directions:
        compiled = lowering.lower(SHAPE, direction).compile()
        if direction == FORWARD:
            lowering.learn_residuals(SHAPE, compiled)
        text, seen = compiled.as_text() or "", seen_pairs(segment.module, SHAPE.tokens)
        cost = hlo_cost(text, seen)
        residuals = jax.tree.leaves(lowering.residual_structs(SHAPE))
        states = [a for a in residuals if a.shape[-hidden.ndim :] == hidden.shape]
        moved = [k for k in hlo_kernels(text, seen)
                 if (k.kind, k.group, k.stride) == (GATHER, tensor, 1)]  # fmt: skip
        analysis: Any = compiled.memory_analysis()
        yield {
            "program": direction,
            "tensor": tensor,
            "hidden_bytes": device_bytes(states),
            "whole_bytes": sum(prod(a.shape[2:]) * a.dtype.itemsize for a in states),
            "residual_bytes": device_bytes(residuals),
            "temp_bytes": analysis.temp_size_in_bytes,
            "moves_of_a_layer": sum(k.repeats for k in moved) / visits,
            "attention_gathers": cost.attention_gathers,
            "parameter_gathers": parameter_gathers(text, tensor),
            "executed_over_needed": cost.flops
            / needed_flops(segment, SHAPE, direction, with_forward=False),
            "collectives": {k: {"count": t.count, "n_bytes": t.n_bytes}
                            for k, t in sorted(cost.collectives.items())},
        }  # fmt: skip


def compiled_rows() -> Iterator[dict[str, Any]]:
    """The rows, from a process that has the compiler, as they come.

    Raises:
      ValueError: the compiler is not installed.
    """
    command, environment = [sys.executable, __file__, "--child"], compiler_environment()
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
        assert process.stdout is not None
        yield from map(json.loads, process.stdout)
    if process.returncode:
        raise RuntimeError(f"the process that compiles ended with {process.returncode}")


def is_good(row: dict[str, Any]) -> bool:
    """Whether a program keeps and moves what it needs and no more."""
    share = row["hidden_bytes"] / row["whole_bytes"]
    gathers = row["attention_gathers"] + row["parameter_gathers"]
    return (
        share <= 1.1 / row["tensor"] and not gathers
        and row["moves_of_a_layer"] <= NEEDED[row["program"]]
    )  # fmt: skip


def show(rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f"Four layers of Qwen2.5-7B on 2 stages x 2 data ranks of {CHIP}")
    table.add_column("program")
    for name in ("tensor", "hidden MiB", "if whole", "residuals MiB", "temporaries MiB",
                 "moves of a layer", "other gathers", "done/needed"):  # fmt: skip
        table.add_column(name, justify="right")
    table.add_column("collectives, MiB")
    for r in rows:
        sizes = (r[f"{n}_bytes"] / MIB for n in ("hidden", "whole", "residual", "temp"))
        table.add_row(
            r["program"],
            str(r["tensor"]),
            *(f"{size:.0f}" for size in sizes),
            f"{r['moves_of_a_layer']:.1f}",
            str(r["attention_gathers"] + r["parameter_gathers"]),
            f"{r['executed_over_needed']:.3f}",
            ", ".join(f"{kind} {t['n_bytes'] / MIB:.0f}" for kind, t in r["collectives"].items()),
        )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_json(parser)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        for tensor in DEGREES:
            for row in measure(tensor):
                print(json.dumps(row), flush=True)
        return 0
    rows = Rows(args.json, as_rows)
    try:
        for row in compiled_rows():
            rows.append(row)
    except ValueError as e:
        parser.error(str(e))
    Console(width=None if sys.stdout.isatty() else 170).print(show(rows))
    return 0 if all(map(is_good, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
