"""Parameters of another run, under another plan."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from dflop_jax.checkpoint.state_arrays import parameter_arrays
from dflop_jax.runtime.layout import make_segments
from dflop_jax.runtime.parameter_layout import initial_structs, param_zero_specs
from dflop_jax.train.load_params import read_segment_params

from ..runtime.plain import whole_of
from ..weights.conftest import MODEL, PLAN, random_params

# The tower's matrices flat over 3 data ranks and 2 tensor ranks, the LLM's in two segments.
SPLIT = PLAN.with_layout(
    submeshes=(dataclasses.replace(PLAN.layout.submeshes[0], stage=1, data=3),
               *PLAN.layout.submeshes[1:]),
    segments=tuple(dataclasses.replace(s, zero=3) for s in PLAN.layout.segments),
)  # fmt: skip


class Saved:
    """A checkpoint of parameters by module."""

    step = 1

    def __init__(self, params):
        leaves = jax.tree_util.tree_leaves_with_path(params)
        names = (jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves)
        self.arrays = {f"params/{n}": a for n, (_, a) in zip(names, leaves, strict=True)}
        self.specs = {
            n: SimpleNamespace(shape=a.shape, numpy_dtype=a.dtype) for n, a in self.arrays.items()
        }

    def read(self, name, start, shape):
        box = tuple(slice(lo, lo + n) for lo, n in zip(start, shape, strict=True))
        return self.arrays[name][box]


def test_parameters_are_the_other_run_s_however_they_are_split():
    saved = Saved(random_params(MODEL, 3))
    for name, s in make_segments(MODEL, SPLIT.layout, jax.devices()).items():
        found = read_segment_params(saved, s, lambda: pytest.fail("nothing is fresh"))
        cuts = param_zero_specs(s)
        whole = {p: jax.tree.map(whole_of, cuts[p], found[p]) for p in found}
        for a, leaf in zip(parameter_arrays(name, s), jax.tree.leaves(whole), strict=True):
            rows = list(a.rows) if a.n_rows is not None else ...
            np.testing.assert_array_equal(leaf, saved.arrays[a.name][rows], err_msg=a.name)


def test_adapters_that_the_other_run_had_not_are_drawn():
    params = random_params(MODEL, 3)
    adapted = MODEL.with_lora(2, 8.0, targets=("llm",))
    for name, s in make_segments(adapted, PLAN.layout, jax.devices()).items():
        structs = initial_structs(s)
        drawn = jax.tree.map(lambda a: np.full(a.shape, 7, a.dtype), structs)
        found = read_segment_params(Saved(params), s, lambda drawn=drawn: drawn)
        arrays = parameter_arrays(name, s)
        kept = Saved(params).arrays
        for a, leaf in zip(arrays, jax.tree.leaves(found), strict=True):
            is_adapter = "/adapter/" in a.name
            assert is_adapter == (a.name not in kept)
            assert np.all(np.asarray(leaf) == 7) == is_adapter, a.name
        assert any("/adapter/" in a.name for a in arrays) == (s.plan.module == "llm")
