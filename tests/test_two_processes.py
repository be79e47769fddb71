"""One pair of processes, and a group of four, run every case that needs more than one process."""

import jax
import numpy as np
import pytest

from tests.processes import ProcessPool
from tests.runtime.test_gradients import oracle
from tests.small import Small
from tests.two_process_cases import FOUR_PLANS, PAIR_PLANS, SIZES, TUNED


@pytest.fixture(scope="module")
def pair():
    pool = ProcessPool(2, 4)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def four():
    pool = ProcessPool(4, 1)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    """(file of the plain gradients, plain loss)"""
    _, _, loss, grads = oracle(Small())
    leaves = jax.tree_util.tree_leaves_with_path(grads)
    file = tmp_path_factory.mktemp("wanted") / "grads.npz"
    np.savez(file, **{jax.tree_util.keystr(path): leaf for path, leaf in leaves})
    return str(file), loss


def check_gradients(pool, name, wanted):
    file, want_loss = wanted
    found = pool.call("tests.two_process_cases:gradients", name, file)
    assert sum(f["loss"] for f in found) == pytest.approx(want_loss, rel=1e-5)
    if name == TUNED:  # collectives run in one order, as all lower the same programs in one order
        assert found[0]["lowered"] == found[1]["lowered"] != []


@pytest.mark.slow(first=2)
@pytest.mark.parametrize("name", PAIR_PLANS)
def test_gradients_over_two_processes_equal_the_plain_ones(name, pair, wanted):
    check_gradients(pair, name, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR_PLANS)
def test_gradients_over_four_processes_equal_the_plain_ones(name, four, wanted):
    check_gradients(four, name, wanted)


def test_a_state_moves_between_processes_as_a_checkpoint_carries_it(pair, tmp_path):
    for found in pair.call("tests.two_process_cases:moves", str(tmp_path)):
        assert found[0] > found[1] == 0


def test_two_processes_exchange_messages_and_have_one_clock(pair):
    first, second = found = pair.call("tests.two_process_cases:messages")
    assert [f["process"] for f in found] == [0, 1]
    assert first["sizes"] == second["sizes"] == SIZES
    assert (first["gathered"], second["gathered"]) == ([["00", "11"]] * 3, [[]] * 3)
    assert first["all"] == second["all"] == [0.5, 1.5]
    assert first["left"] == []  # no message stays with the service
    assert first["offset_s"] == 0.0
    assert abs(second["offset_s"]) < 0.1
