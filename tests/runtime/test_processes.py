"""The same step on 2 and 4 processes: every process's shards equal the plain computation."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from dflop_jax.runtime.compiling import _compiling_process, threads_for
from tests.processes import run_processes
from tests.small import Small

from .gradients_main import LAYOUTS
from .test_gradients import oracle


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    """File of the plain gradients, and the plain loss."""
    _, _, loss, grads = oracle(Small())
    leaves = jax.tree_util.tree_leaves_with_path(grads)
    arrays = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
    file = tmp_path_factory.mktemp("wanted") / "grads.npz"
    np.savez(file, **arrays)
    return file, loss


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("n, devices", LAYOUTS)
def test_gradients_over_processes_equal_the_plain_ones(n, devices, wanted):
    file, want_loss = wanted
    layouts = LAYOUTS[n, devices]
    outputs = run_processes("tests.runtime.gradients_main", n, devices, [str(file)])
    found = np.zeros(len(layouts))
    for output in outputs:
        lines = output.splitlines()
        assert [x[7:] for x in lines if x.startswith("equal: ")] == list(layouts)
        found += [float(x[5:]) for x in lines if x.startswith("loss ")]
    orders = [[x for x in o.splitlines() if x.startswith("compiles: ")] for o in outputs]
    assert all(order == orders[0] for order in orders)
    assert len(orders[0]) > 5 or not any(x.startswith("both on") for x in layouts)
    np.testing.assert_allclose(found, np.full(len(layouts), want_loss), rtol=1e-5)


@pytest.mark.parametrize("platform, by, threads", [("cpu", "257257", 4), ("gpu", "222222", 1)])
def test_one_of_the_processes_that_run_a_program_compiles_it(platform, by, threads):
    """They take turns where nothing is tuned on the devices; else one does all, one at a time."""
    devices = [SimpleNamespace(process_index=p, platform=platform) for p in (7, 2, 2, 5)]
    segment = SimpleNamespace(mesh=SimpleNamespace(devices=np.array(devices)))
    programs = SimpleNamespace(segments={"a": segment})
    assert "".join(str(_compiling_process(programs, ("a", i), i)) for i in range(6)) == by
    assert threads_for([segment]) == threads
