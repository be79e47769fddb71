"""The order of samples: Grain's own numbers, recorded, and a permutation every epoch."""

import json
from pathlib import Path

import numpy as np
import pytest

from dflop_jax.data.shuffle import shuffled_indices

# "n seed epoch": the first indices of that epoch of grain 0.2.18's
# MapDataset.range(n).seed(seed).shuffle().repeat(), and a check sum of the first 64
GOLDEN = json.loads(Path(__file__).with_name("grain_order.json").read_text())


def check_sum(indices):
    return int((np.asarray(indices, object) * np.arange(1, len(indices) + 1)).sum() % (2**61 - 1))


@pytest.mark.parametrize("case", GOLDEN)
def test_the_order_is_that_of_grain(case):
    n, seed, epoch = map(int, case.split())
    first, total = GOLDEN[case]
    indices = shuffled_indices(np.arange(epoch * n, epoch * n + min(n, 64)), n, seed).tolist()
    assert indices[: len(first)] == first
    assert check_sum(indices) == total


@pytest.mark.parametrize("n", [1, 2, 5, 1000, 4096, 65535, 65536, 65537, 65539, 262145])
def test_every_index_once_an_epoch(n):
    places = np.arange(2 * n)
    for epoch in np.split(shuffled_indices(places, n, 3), 2):
        assert np.bincount(epoch, minlength=n).tolist() == [1] * n


def test_random_access_and_the_seed():
    whole = shuffled_indices(np.arange(300), 70, 1)
    some = np.array([299, 0, 70, 69, 0])
    assert shuffled_indices(some, 70, 1).tolist() == whole[some].tolist()
    assert shuffled_indices(some[:0], 70, 1).tolist() == []
    epochs = whole[:280].reshape(4, 70)
    assert len({tuple(e) for e in epochs.tolist()}) == 4
    assert shuffled_indices(np.arange(70), 70, 2).tolist() != epochs[0].tolist()
