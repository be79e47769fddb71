"""The integer program of a plan is written once, and read by later starts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dflop_jax.schedule.count_program import ProgramSizes, canonicalize, program_sizes
from dflop_jax.train import plan_trials
from dflop_jax.train.plan_trials import load_count_program

from ..runtime import plain
from ..small import Small


@pytest.fixture
def written(monkeypatch):
    """The sizes of what cvxpy writes meanwhile."""
    sizes: list[ProgramSizes] = []
    monkeypatch.setattr(
        plan_trials, "canonicalize", lambda wanted: sizes.append(wanted) or canonicalize(wanted)
    )
    return sizes


def of_grouping(plan, grouping):
    return replace(plan, scheduling=replace(plan.scheduling, grouping=grouping))


def test_it_is_written_once_and_again_where_it_is_damaged(tmp_path, written):
    plan = of_grouping(plain.plan_of(Small(), (0, 1, 1, 1), (1, 1, 1, 1)), "balanced")
    expected = canonicalize(program_sizes(plan.layout))
    assert load_count_program(plan, tmp_path) == expected
    assert load_count_program(plan, tmp_path) == expected
    assert written == [program_sizes(plan.layout)]
    (file,) = tmp_path.glob("counts-*.json")
    file.write_bytes(file.read_bytes()[:-20])
    assert load_count_program(plan, tmp_path) == expected
    assert len(written) == 2
    assert load_count_program(of_grouping(plan, "arrival"), tmp_path) is None
    assert len(written) == 2
