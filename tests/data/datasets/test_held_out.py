"""Which records are held out: as many as asked for, everywhere alike, none that training shows."""

from collections import Counter

import numpy as np
import pytest

from dflop_jax.data.datasets.mixture import select_held_out


def lots(rng, sizes):
    return [rng.integers(0, 2**64, size=n, dtype=np.uint64) for n in sizes]


@pytest.mark.parametrize(
    "sizes, n, counts",
    [
        ([2], 1, [1]),
        ([10], 9, [9]),
        ([60, 15, 2], 20, [16, 3, 1]),
        ([100, 1, 1], 10, [10, 0, 0]),  # these two are trained on
        ([5000, 5000], 64, [32, 32]),
        ([50, 50, 2], 2, [1, 1, 0]),
        ([0, 7], 3, [0, 3]),
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_each_part_gives_its_share(sizes, n, counts, seed):
    numbers = lots(np.random.default_rng(seed), sizes)
    masks = select_held_out(numbers, n, seed)
    assert [int(m.sum()) for m in masks] == counts
    assert [len(m) for m in masks] == sizes
    # Whatever the order: each process and each run draws the same ids.
    again = select_held_out([part[::-1] for part in numbers], n, seed)
    assert all((m == a[::-1]).all() for m, a in zip(masks, again, strict=True))


@pytest.mark.parametrize("n, total", [(1, 1), (2, 2), (5, 4), (100, 10)])
def test_something_is_left_to_train_on(n, total):
    with pytest.raises(ValueError, match=f"{n} held-out samples of {total} records; lower train"):
        select_held_out(lots(np.random.default_rng(0), [total]), n, 0)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_share_is_drawn_by_each_id_alone(seed):
    """Of data that grow or change their order the same records are held out, of a larger share
    these and more, and records of one id in all parts alike."""
    (ids,) = lots(np.random.default_rng(seed), [20_000])
    (tenth,) = select_held_out([ids], 0.1, seed)
    assert abs(int(tenth.sum()) - 2000) < 4 * np.sqrt(20_000 * 0.1 * 0.9)
    order = np.random.default_rng(1).permutation(len(ids))[:12_345]
    parts = select_held_out([ids[order], ids[:77], ids[:0]], 0.1, seed)
    assert [m.tolist() for m in parts] == [tenth[order].tolist(), tenth[:77].tolist(), []]
    (fifth,) = select_held_out([ids], 0.2, seed)
    assert not (tenth & ~fifth).any()
    (other,) = select_held_out([ids], 0.1, seed + 2)
    assert abs(int((tenth & other).sum()) - 200) < 4 * np.sqrt(200)


@pytest.mark.parametrize("share, which", [(1e-9, "no"), (1 - 1e-12, "every")])
def test_a_share_leaves_something_on_both_sides(share, which):
    with pytest.raises(ValueError, match=f"of 5 records holds out {which} record; give another"):
        select_held_out(lots(np.random.default_rng(0), [3, 2]), share, 0)


@pytest.mark.parametrize("seed", range(20))
def test_equal_ids_are_held_out_together_and_all_count(seed):
    """Ids that stand in several parts, or several times in one."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 2**64, size=40, dtype=np.uint64)
    numbers = [rng.choice(ids, rng.integers(1, 30)) for _ in range(rng.integers(1, 4))]
    n = int(rng.integers(5, 12))
    total = Counter(np.concatenate(numbers).tolist())
    try:
        masks = select_held_out(numbers, n, seed)
    except ValueError:
        assert total.total() < n + len(numbers) * max(total.values())
        return
    held = Counter(x for part, m in zip(numbers, masks, strict=True) for x in part[m].tolist())
    assert all(total[number] == count for number, count in held.items())
    assert n <= held.total() < total.total()
    # Each part gives one id more than it needs at most.
    assert held.total() < n + len(numbers) * max(total.values())
