"""Matrices in 8 bits in a program compiled for an H100 that is not here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from dflop_jax.gpu_compile.toolchain import compiler_environment

from .quantized_child import LAYERS, MLP, WIDTH
from .test_compiling import needs_compiler

# Elements of a layer's matrices, and of their scales; keys and values have half the heads.
MATRICES = 3 * WIDTH * MLP + 2 * WIDTH * WIDTH + 2 * WIDTH * WIDTH // 2
SCALES = (MLP + MLP + WIDTH) + (WIDTH + WIDTH) + (WIDTH // 2 + WIDTH // 2)


@needs_compiler
def test_floats_of_a_matrix_live_as_long_as_its_layer():
    ran = subprocess.run(
        [sys.executable, "-m", "tests.gpu_compile.quantized_child"],
        env=compiler_environment(),
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr
    before, after = json.loads(ran.stdout).values()
    for form in (before, after):
        # What plans count is what the program is given, to the byte.
        assert form["planned"] + form["others"] == form["arguments"]
    saved = LAYERS * (MATRICES - 4 * SCALES)
    assert before["arguments"] - after["arguments"] == saved
    # A stack of the smallest matrices is larger than any array of floats, and what is alive at once
    # is no more than before but for floats of one layer.
    assert before["largest_floats"] == LAYERS * WIDTH * MLP
    assert after["largest_floats"] < before["largest_floats"] / 4
    assert after["temporaries"] - before["temporaries"] < 2 * MATRICES
