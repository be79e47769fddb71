"""The same step on 2 processes: every process's shards equal the plain computation."""

import jax
import numpy as np
import pytest

from tests.processes import run_processes

from .gradients_main import LAYOUTS
from .test_gradients import oracle


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    """File of the plain gradients and the plain loss, by tied or not."""
    arrays, losses = {}, {}
    for tied in (True, False):
        _, _, losses[tied], grads = oracle(tied)
        for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
            arrays[f"{tied}/{jax.tree_util.keystr(path)}"] = leaf
    file = tmp_path_factory.mktemp("wanted") / "grads.npz"
    np.savez(file, **arrays)
    return file, losses


@pytest.mark.parametrize("n, devices", LAYOUTS)
def test_gradients_over_processes_equal_the_plain_ones(n, devices, wanted):
    file, losses = wanted
    layouts = LAYOUTS[n, devices]
    outputs = run_processes("tests.pipeline.gradients_main", n, devices, [str(file)])
    found = np.zeros(len(layouts))
    for output in outputs:
        lines = output.splitlines()
        assert [x[7:] for x in lines if x.startswith("equal: ")] == list(layouts)
        found += [float(x[5:]) for x in lines if x.startswith("loss ")]
    orders = [[x for x in o.splitlines() if x.startswith("compiles: ")] for o in outputs]
    assert all(order == orders[0] for order in orders)
    assert len(orders[0]) > 5 or devices > 1
    for (_, _, options), loss in zip(layouts.values(), found, strict=True):
        np.testing.assert_allclose(loss, losses[options.get("tied", True)], rtol=1e-5)
