"""First fit by its tree of free rows, against the rule in plain loops."""

import numpy as np
import pytest

from dflop_jax.records import Bucket, Load, Shape
from dflop_jax.schedule.batch import Batch, Capacity
from dflop_jax.schedule.packing import first_fit


def plainly(loads, order, n_rows, row_room, tiles):
    """Rows of each microbatch: a sample goes to the first that has a row and tiles for it."""
    packed = []
    for i in order:
        text, pictures = loads[i].tokens("llm"), len(loads[i].lengths("vision"))
        for rows in packed:
            used = sum(len(loads[j].lengths("vision")) for row in rows for j in row)
            free = [row_room - sum(loads[j].tokens("llm") for j in row) for row in rows]
            fitting = [r for r in range(n_rows) if free[r] >= text]
            if fitting and used + pictures <= tiles:
                rows[fitting[0]].append(i)
                break
        else:
            packed.append([[i], *([] for _ in range(n_rows - 1))])
    return packed


@pytest.mark.parametrize(
    "n, rows, ranks", [(0, 1, 1), (1, 1, 1), (40, 1, 1), (60, 3, 1), (90, 5, 2)]
)
def test_it_is_the_rule(n, rows, ranks):
    for seed in range(4):
        rng = np.random.default_rng([n, rows, seed])
        loads = [
            Load({"vision": (16,) * int(rng.integers(4)), "llm": (int(rng.integers(1, 101)),)})
            for _ in range(n)
        ]
        bucket = Bucket.of({"vision": Shape(4, 16), "llm": Shape(rows, 100)})
        capacity = Capacity({"vision": ranks, "llm": ranks})
        batch = Batch(loads, ("vision", "llm"))
        assert n == 0 or batch.anchor == "llm"
        order = rng.permutation(n).tolist()
        got = first_fit(batch, order, bucket, capacity)
        assert got == plainly(loads, order, rows * ranks, 100, 4 * ranks)
