"""What the host does for a task, in prices, schedules and bounds: by hand."""

from dataclasses import replace

import numpy as np
import pytest

from dflop_jax.records import (
    BACKWARD,
    Load,
    Price,
    PriceList,
    Prices,
    ProgramId,
    Shape,
    add_host_work,
)
from dflop_jax.schedule import schedule_batch
from dflop_jax.schedule.correction import price_digest
from tests.schedule.conftest import bucket, make_plan

ROW_S = 0.01
PLAN = make_plan([bucket(None, (4, 128)), bucket(None, (1, 128))], ranks={"b": 1})


def prices(host_s, *, shares_cores=True):
    """A row takes the device as long in every shape, so that padding is all a large group costs."""
    programs = {
        ProgramId("b", shape, BACKWARD): Price(
            float(add_host_work(ROW_S * shape.rows, host_s, shares_cores=shares_cores))
        )
        for shape in PLAN.layout.shapes("b")
    }
    return Prices(programs, host_s=host_s, shares_cores=shares_cores)


@pytest.mark.parametrize("seconds", [[], [0.5], [0.5, 2.0, 0.0]])
def test_host_work_is_added_on_shared_cores_and_hidden_elsewhere(seconds):
    together = add_host_work(np.array(seconds), 1.0, shares_cores=True)
    assert together.tolist() == [s + 1.0 for s in seconds]
    hidden = add_host_work(np.array(seconds), 1.0, shares_cores=False)
    assert hidden.tolist() == [max(s, 1.0) for s in seconds]
    for shares_cores in (True, False):
        same = add_host_work(np.array(seconds), 0.0, shares_cores=shares_cores)
        assert same.tolist() == seconds


@pytest.mark.parametrize(
    "host_s, shares_cores, rows",
    [
        (0.0, True, [1] * 7),
        (0.0, False, [1] * 7),
        (ROW_S, True, [4, 4]),  # 2 x (4 + 1) rows' seconds against 4 + 1 + 3 x (1 + 1)
        (3 * ROW_S, False, [4, 4]),  # 2 x 4 against 4 + 3 x 3
        (0.5 * ROW_S, False, [1] * 7),  # hidden
    ],
)
def test_small_groups_are_used_only_if_the_host_keeps_up(host_s, shares_cores, rows):
    """Seven full rows in groups of four rows, of which one would be empty, and of one."""
    loads = [Load({"b": (128,)})] * 7
    found = prices(host_s, shares_cores=shares_cores)
    schedule = schedule_batch(loads, PLAN, found, ["b"], work=400)
    assert [g.shape.rows for g in schedule.groups] == rows
    each_s = [max(ROW_S * n, host_s) if not shares_cores else ROW_S * n + host_s for n in rows]
    assert schedule.makespan_s == pytest.approx(sum(each_s))
    assert schedule.lower_bound_s <= schedule.makespan_s
    assert schedule.status == "optimal"


def test_price_digest_includes_host_work():
    """Those without are named as ever, so that what other runs learnt of them holds."""
    without = Prices({ProgramId("b", Shape(1, 128), BACKWARD): Price(0.25)})
    assert price_digest(without) == "2be9e3e74dd0632b"
    some, other = (replace(without, host_s=0.5, shares_cores=c) for c in (True, False))
    assert len({price_digest(p) for p in (without, some, other)}) == 3
    assert PriceList.from_prices(some).prices == some
    with pytest.raises(ValueError, match="finite and not negative"):
        Prices({}, host_s=-1.0)
