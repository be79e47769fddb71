"""A mesh axis is added in one place: the engine, imported anew with one more axis of size 1 in
`records/mesh.py` and nothing else changed, computes the same step."""

import importlib
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import spec_from_loader

import jax
import numpy as np
import pytest

from dflop_jax.records import mesh

OURS = ("dflop_jax", "models", "tests")
FIELD = "    data: int = 1\n"
NEW = "    made_up: int = 1\n"


def one_step():
    """(axes of the meshes, loss, gradients) of a step whose segments have several devices on every
    axis: stages, data ranks that split state, tensors, and an exchange between data ranks."""
    small, plain, gradients = (
        importlib.import_module(f"tests.{name}")
        for name in ("small", "runtime.plain", "runtime.test_gradients")
    )
    model = small.Small()
    plan = plain.plan_of(model, (0, 1, 2, 1), (2, 2, 1, 2), bucket=(36, 240), group_size=2)
    plan = plain.with_zero(plan, vision=2).with_layout(buckets=plan.layout.buckets[:1])
    samples = plain.random_samples(model, gradients.N, 1)
    schedule = plain.random_schedule(plan, samples, 2, seed=1)
    loss, grads, *_ = gradients.grads_of(model, plan, samples, schedule)
    return importlib.import_module("dflop_jax.records").AXES, loss, jax.tree.leaves(grads)


@pytest.mark.slow
def test_one_more_axis_changes_one_file_and_no_gradient(monkeypatch):
    class WithAxis(SourceFileLoader):
        def get_code(self, fullname):
            text = self.get_data(self.path).decode()
            assert text.count(FIELD) == 1
            return compile(text.replace(FIELD, NEW + FIELD), self.path, "exec")

    class Finder:
        def find_spec(self, fullname, path=None, target=None):
            here = fullname == mesh.__name__
            return spec_from_loader(fullname, WithAxis(fullname, mesh.__file__)) if here else None

    axes, loss, grads = one_step()
    for name in [n for n in sys.modules if n.split(".")[0] in OURS]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    more_axes, *again = one_step()
    assert (axes, set(more_axes) - set(axes)) == (("stage", "data", "model"), {"made_up"})
    assert again[0] == loss
    assert len(again[1]) == len(grads) > 0
    for got, want in zip(again[1], grads, strict=True):
        np.testing.assert_array_equal(got, want)
