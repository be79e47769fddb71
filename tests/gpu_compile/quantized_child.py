"""A decoder with adapters compiled for an H100 that is not here, with its matrices as floats and in
8 bits: prints of each the bytes of one backward program, as JSON."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from math import prod

import jax

from dflop_jax.gpu_compile.chips import absent_devices
from dflop_jax.hardware import find_hardware
from dflop_jax.pipeline.layout import device_mesh
from dflop_jax.pipeline.lowering import Lowering
from dflop_jax.pipeline.segment import Segment
from dflop_jax.profile.measure import assembled
from dflop_jax.profile.state import working_bytes
from dflop_jax.records import BACKWARD, LayerTiming, MeshShape, SegmentPlan, Shape
from models.llava import build

WIDTH, MLP, LAYERS, TOKENS = 256, 1024, 12, 128  # more layers than are unrolled
SHAPE = Shape(1, TOKENS)


def figures(model) -> dict[str, float]:
    module = model.modules["llm"].on_chip("sm_90")
    plan = SegmentPlan("llm", "llm", 0, LAYERS, "all", True, True, "layers")
    devices = absent_devices("h100", find_hardware("h100"), 8)
    mesh = device_mesh(MeshShape(), devices)
    segment = Segment(plan, module, mesh, 1, frozenset(("adapter",)))
    lowering = Lowering(segment)
    program = lowering.lower(SHAPE, BACKWARD).compile()
    _, *others = lowering.argument_structs(SHAPE, BACKWARD)
    timing = LayerTiming("llm", 1, SHAPE, 1.0, 1.0, 1.0, 1.0)
    profile = assembled(
        model, {"llm": [SHAPE]}, [timing], key="", device="", concurrency=1.0,
        task_overhead_s=0.0, priced_by="",
    )  # fmt: skip
    floats = re.findall(r"\b(?:bf16|f32)\[([\d,]+)\]", program.as_text())
    stats = program.memory_analysis()
    return {
        "arguments": stats.argument_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
        "planned": float(working_bytes(plan, MeshShape(), profile)),
        "others": sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(others)),
        "largest_floats": max(prod(map(int, dims.split(","))) for dims in floats),
    }


def main() -> None:
    nano = build("nano", "bfloat16", "xla")
    decoder = replace(
        nano.size.decoder, n_layers=LAYERS, width=WIDTH, n_heads=4, n_kv_heads=2, mlp=MLP, vocab=512
    )
    model = replace(nano, size=replace(nano.size, decoder=decoder, vision=None)).with_lora(4, 8.0)
    forms = {"bfloat16": model, "int8": model.with_quantized(("llm",))}
    print(json.dumps({name: figures(form) for name, form in forms.items()}))


if __name__ == "__main__":
    main()
