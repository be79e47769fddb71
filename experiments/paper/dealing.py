"""Samples dealt to microbatches and data ranks where nothing is padded to a bucket (`exact`).

"arrival": in the order in which they come, which is random; "balanced": DFLOP's scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflop_jax.pipeline.order import resources
from dflop_jax.plan.placement import Placement
from dflop_jax.records import Load
from dflop_jax.schedule.solver.balance import balance
from dflop_jax.schedule.solver.greedy import lpt
from dflop_jax.schedule.solver.problem import make_problem
from experiments.paper.exact import (
    DIRECTIONS,
    Array,
    ExactCosts,
    ExactStep,
    is_replicated,
    plan_of,
    ranks_of,
    run_bins,
)

_WORK = 5_000  # units of the balanced rule


def run_step(
    costs: ExactCosts,
    placement: Placement,
    batch: Sequence[Load],
    n_microbatches: int,
    grouping: str,
) -> ExactStep:
    """Simulate one step of a batch; ValueError as for `bins_of`."""
    bins = bins_of(costs, placement, batch, n_microbatches, grouping)
    return run_bins(costs, placement, batch, bins, n_microbatches)


def bins_of(
    costs: ExactCosts,
    placement: Placement,
    batch: Sequence[Load],
    n_microbatches: int,
    grouping: str,
) -> Array:
    """Bin of each sample, int [samples]: microbatch * ranks of the last module + rank.

    Raises:
      ValueError: fewer samples than bins, or an unknown grouping.
    """
    ranks = ranks_of(placement)[costs.last]
    n_bins = n_microbatches * ranks
    if n_microbatches < 1 or n_bins > len(batch):
        raise ValueError(
            f"{len(batch)} samples do not fill {n_microbatches} microbatches on {ranks} ranks; "
            "use fewer microbatches or a larger global batch"
        )
    if grouping == "arrival":
        return np.arange(len(batch)) % n_bins
    if grouping != "balanced":
        raise ValueError(f"grouping {grouping!r} is not arrival or balanced")
    rates = rates_of(costs, placement)
    return balance(
        rates.columns(costs, batch),
        n_bins,
        time_limit_s=30.0,
        bin_group=ranks if rates.grouped else 1,
        grouped=rates.grouped,
        work=_WORK,
    ).bins


@dataclass(frozen=True)
class Rates:
    """What a unit of each module's amount adds to the stages, relative to the dearest: a row for
    each kind of stage, to 2 digits, so that like placements deal alike. `grouped` are the rows of
    which all ranks of a microbatch share one."""

    rows: tuple[tuple[tuple[str, float], ...], ...]
    grouped: tuple[int, ...]

    def columns(self, costs: ExactCosts, batch: Sequence[Load]) -> Array:
        """[samples, rows]."""
        amounts = {
            m: np.array([costs.amount(load, m) for load in batch], float)
            for m in costs.profile.n_layers
        }
        return np.stack([sum(rate * amounts[m] for m, rate in row) for row in self.rows], axis=1)


def rates_of(costs: ExactCosts, placement: Placement) -> Rates:
    """Stages that no sample loads more than another stage are left out."""
    of, ranks = resources(plan_of(costs, placement)), ranks_of(placement)
    coupled = not is_replicated(placement)
    rate: dict[int, dict[str, float]] = {}
    for s in placement.segments:
        tile = costs.profile.piece_tokens.get(s.module)
        sizes = np.array([8.0, 40.0] if tile else [1024.0, 5120.0])
        pairs = sizes * (tile**2 if tile else 1024.0)
        mesh = placement.mesh_of(s)
        both = sum(costs.segment_s(s, mesh, d, sizes, pairs) for d in DIRECTIONS)
        each = float(np.diff(both)[0] / np.diff(sizes)[0])
        row = rate.setdefault(of[s.submesh], {})
        spread = ranks[s.module] if s.module != costs.last and coupled else 1
        row[s.module] = row.get(s.module, 0.0) + each / spread
    dearest = max(v for row in rate.values() for v in row.values())
    rows = {tuple((m, float(f"{v / dearest:.1e}")) for m, v in r.items()) for r in rate.values()}
    kept = [a for a in sorted(rows) if not any(_exceeds(b, a) for b in rows)]
    others = (i for i, row in enumerate(kept) if costs.last not in dict(row))
    return Rates(tuple(kept), tuple(others) if coupled else ())


def _exceeds(b: tuple[tuple[str, float], ...], a: tuple[tuple[str, float], ...]) -> bool:
    return a != b and all(dict(b).get(m, 0.0) >= v for m, v in a)


def dealt_quickly(
    costs: ExactCosts, rates: Rates, batch: Sequence[Load], n_bins: int, ranks: int
) -> Array:
    """Bins as of "balanced", by the largest sample first alone."""
    width = ranks if rates.grouped else 1
    columns = rates.columns(costs, batch)
    return lpt(make_problem(columns, n_bins, None, None, width, rates.grouped))
