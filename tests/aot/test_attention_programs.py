"""Attention of two equal layers, compiled for a GPU that is not here: which library runs what."""

import subprocess
import sys

import pytest

from dflop_jax.aot.chips import compiler_environment

from .test_compiling import needs_compiler

PROGRAM = """
import sys
import jax, jax.numpy as jnp
from dflop_jax.aot.chips import absent_devices
from dflop_jax.hardware import find_hardware
from models.attention import attention

mesh = jax.sharding.Mesh(absent_devices(find_hardware("h100"), 2), "model")
heads = jax.NamedSharding(mesh, jax.P(None, None, "model"))
x = jax.ShapeDtypeStruct((2, 729, 4, 72), jnp.bfloat16, sharding=heads)

def gradient(q, dout):
    def attend(q, k):
        return attention(q, k, k, None, causal=False, kernel=sys.argv[1], chip="sm_90")
    return jax.vjp(lambda q: attend(attend(q, q), q), q)[1](dout)

with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    text = jax.jit(gradient).lower(x, x).compile().as_text()
for name in ("fmhaSoftmax\\"", "fmhaSoftmaxBackward", "xla.gpu.triton\\"", "all-gather("):
    print(text.count(name), end=" ")
"""


@needs_compiler
@pytest.mark.parametrize("kernel, calls", [("auto", "2 0 4 0"), ("cudnn", "2 2 0 0")])
def test_tiles(kernel, calls):
    """By default no backward of cuDNN; each backward has the forward that was already run."""
    run = [sys.executable, "-c", PROGRAM, kernel]
    done = subprocess.run(run, env=compiler_environment(), capture_output=True, text=True)
    assert done.stdout.split() == calls.split(), done.stderr[-2000:]
