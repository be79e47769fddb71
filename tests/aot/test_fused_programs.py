"""Layers of an encoder, compiled for a GPU that is not here: what its library adds to products, and
that no array has other tokens than the 736 of a layer."""

import subprocess
import sys

import pytest

from dflop_jax.aot.chips import compiler_environment

from .test_compiling import needs_compiler

PROGRAM = """
import sys
import jax, jax.numpy as jnp
from dflop_jax.aot.chips import absent_devices
from dflop_jax.contract import on_chip
from dflop_jax.hardware import find_hardware
from dflop_jax.records import Edge, MeshShape, SegmentPlan, Shape
from dflop_jax.runtime.layout import device_mesh
from dflop_jax.runtime.lowering import Lowering
from dflop_jax.runtime.segment import Segment
from models.sizes import VisionSize
from models.vit import VisionModule

module = VisionModule(VisionSize(27 * 14, 14, 256, 2, 4, 1024), 256, jnp.dtype("bfloat16"))
plan = SegmentPlan("vision", "vision", 0, 2, "one", True, True, "none")
mesh = device_mesh(MeshShape(), absent_devices(find_hardware("h100"), 1))
parts = frozenset(("entry", "layers", "exit"))
edges = (Edge("vision", "llm", "visual"),)
s = Segment(plan, on_chip(module, "sm_90"), mesh, 1, parts, edges=edges)
text = Lowering(s).lower(Shape(3, 729), sys.argv[1]).compile().as_text()
for name in ('"epilogue":"BIAS_GELU_AUX"', '"epilogue":"BIAS"', '"beta":1', "[3,729,4", "[3,768,"):
    print(text.count(name), end=" ")
"""


@needs_compiler
@pytest.mark.parametrize(
    "direction, want",
    [
        # Of two layers: GELU after its product; biases of queries, keys, values and of the layer's
        # end, whose product also adds to the hidden states. Both ends have a bias more.
        ("forward", "2 10 2 0 0"),
        # Of two layers: six gradients of matrices are added to their sums, and one of the hidden
        # states to another; of the ends, three.
        ("backward", "0 0 17 0 0"),
    ],
)
def test_products_add_what_they_can(direction, want):
    run = [sys.executable, "-c", PROGRAM, direction]
    done = subprocess.run(run, env=compiler_environment(), capture_output=True, text=True)
    assert done.stdout.split() == want.split(), done.stderr[-2000:]
