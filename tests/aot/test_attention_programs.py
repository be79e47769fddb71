"""Attention of two equal layers, compiled for a GPU that is not here: which library runs what."""

import subprocess
import sys

import pytest

from dflop_jax.aot.chips import compiler_environment
from models import attention_tokamax

from .test_compiling import needs_compiler

PROGRAM = """
import sys
import jax, jax.numpy as jnp
from dflop_jax.aot.chips import absent_devices
from dflop_jax.hardware import find_hardware
from models.attention import attention

mesh = jax.sharding.Mesh(absent_devices(find_hardware("h100"), 2), "model")
heads = jax.NamedSharding(mesh, jax.P(None, None, "model"))
kernel, packed = sys.argv[1], sys.argv[2] == "True"
x = jax.ShapeDtypeStruct((2, 729, 4, 72), jnp.bfloat16, sharding=heads)
ids = jax.ShapeDtypeStruct((2, 729), jnp.int32, sharding=jax.NamedSharding(mesh, jax.P()))

def gradient(q, dout, ids):
    def attend(q, k):
        marks = ids if packed else None
        return attention(q, k, k, marks, causal=packed, kernel=kernel, chip="sm_90")
    return jax.vjp(lambda q: attend(attend(q, q), q), q)[1](dout)

with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    text = jax.jit(gradient).lower(x, x, ids).compile().as_text()
kernels = "fmhaSoftmax\\"", "fmhaSoftmaxBackward", '"mosaic_gpu', "xla.gpu.triton\\""
for name in (*kernels, "all-gather("):
    print(text.count(name), end=" ")
"""


FORWARD = "2 4" if attention_tokamax.is_available() else "0 6"


@needs_compiler
@pytest.mark.parametrize(
    "kernel, packed, calls",
    [
        ("auto", False, "2 0 0 4 0"),  # no backward of cuDNN
        ("cudnn", False, "2 2 0 0 0"),  # each backward with the forward that was already run
        ("auto", True, f"0 0 {FORWARD} 0"),
    ],
)
def test_rows(kernel, packed, calls):
    run = [sys.executable, "-c", PROGRAM, kernel, str(packed)]
    done = subprocess.run(run, env=compiler_environment(), capture_output=True, text=True)
    assert done.stdout.split() == calls.split(), done.stderr[-2000:]
