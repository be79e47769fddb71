"""The candidates of the policy `dip`: ranks, and into how many groups a mean batch is cut.

There are few placements but dear ones to simulate, so candidates are made when their bound's turn
comes. No schedule of a cut is faster than its groups' work shared out evenly over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from dflop_jax.config import PlanConfig
from dflop_jax.plan.dip import (
    POLICY,
    Ranks,
    module_s,
    placement,
    spaces,
    with_sub_microbatches,
)
from dflop_jax.plan.evaluate import Evaluator, as_plan
from dflop_jax.plan.options import saving_words
from dflop_jax.plan.ranking import Ranked, Upcoming
from dflop_jax.plan.volume import ROOM, group_pairs, least_groups, packed_rows, piece_rows
from dflop_jax.records import Bucket, Plan, Shape, SubmeshPlan

# Groups for each rank, beyond which filling and draining the pipeline hardly costs: more are tried
# only where memory does not hold fewer.
_ENOUGH = 8


@dataclass(frozen=True)
class _Known:
    """What is known of a candidate before it is simulated: see `Ranked`; `parts` as for
    `uniform_groups`."""

    ranks: Ranks
    cut: int
    plan: Plan
    parts: dict[str, int]
    bound_s: float
    most: Bucket | None
    groups: tuple[int, ...]


class DipSpace:
    """All candidates of the policy on so many devices.

    Attributes:
      ranks: the placements. nearest: (bytes of the device that needs most, what it is) of the
        candidates that memory does not hold, as far as they were made.

    Raises:
      ValueError: there is no placement.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        n_devices: int,
        config: PlanConfig,
        allowed: Callable[[SubmeshPlan], bool],
    ):
        self._evaluator, self._rules = evaluator, evaluator.rules
        timed = {(t.module, t.model) for t in self._rules.profile.timings}
        degrees = {m: [k for n, k in timed if n == m] for m in self._rules.n_layers}
        self.nearest: list[tuple[float, str]] = []
        self._placements = {
            r: p
            for r in spaces(self._rules, n_devices, config, degrees)
            if all(map(allowed, (p := placement(self._rules, r)).submeshes))
        }
        if not self._placements:
            raise ValueError(_none(n_devices, config, self._rules.n_layers))

    def __len__(self) -> int:
        return len(self._placements)

    def upcoming(self) -> list[Upcoming]:
        """Every candidate with a lower bound of its mean makespan, the least first."""
        found: list[Upcoming] = []
        cuts = self._rules.cuts(1)
        for ranks in self._placements:
            finest = self._plan(ranks, self._bucket(ranks, int(cuts[-1]))).buckets[0]
            plan: Plan | None = None
            # With fewer groups than ranks these would wait for each other.
            for cut in cuts[cuts >= min(ranks.count, cuts[-1])].tolist():
                if cut > _ENOUGH * ranks.count and plan and self._evaluator.fits(plan):
                    break
                bucket = self._bucket(ranks, cut)
                plan = self._plan(ranks, bucket)
                if not self._trusted(plan.buckets[0], finest):
                    plan = None
                    continue
                groups = self._least_groups(ranks, plan)
                parts = self._parts(ranks, cut, plan)
                bound_s = float(np.mean(groups)) * self._group_s(ranks, plan, parts)
                most = bucket if self._rules.memory_bytes else None
                known = _Known(ranks, cut, plan, parts, bound_s, most, groups)
                make = partial(self._made, known)
                found.append((bound_s, make))
        return sorted(found, key=lambda x: x[0])

    def _trusted(self, bucket: Bucket, finest: Bucket) -> bool:
        """Whether the prices of a bucket are believed, or no cut is finer."""
        return all(
            s.size <= max(self._rules.trusted_tokens(m), finest.tokens(m)) for m, s in bucket.shapes
        )

    def _bucket(self, ranks: Ranks, cut: int) -> Bucket:
        """The shapes that cut a mean batch into so many groups of every module, none divided."""
        rules = self._rules
        shapes: dict[str, Shape | None] = {}
        for m, volume in rules.volumes.items():
            if m in rules.profile.piece_tokens:
                rows, tokens = piece_rows(volume, cut, ranks.data), rules.profile.piece_tokens[m]
            else:
                rows, tokens = packed_rows(
                    volume, np.array([cut]), ranks.data, rules.costs, m, ranks.model,
                    rules.token_multiple,
                )  # fmt: skip
            rows, tokens = int(np.max(rows)), int(np.max(tokens))
            shapes[m] = Shape(rows, tokens) if rows else None
        return Bucket.of(shapes)

    def _least_groups(self, ranks: Ranks, plan: Plan) -> tuple[int, ...]:
        """Groups that each sampled batch takes at least, those that feed one counted once."""
        rules = self._rules
        each = []
        for m, shape in plan.buckets[0].shapes:
            room = shape.rows if m in rules.profile.piece_tokens else shape.size
            room *= ranks.data * (plan.fan_in if m in plan.divided else 1)
            each.append(least_groups(rules.volumes[m], np.array(room)))
        return tuple(np.max(each, axis=0).astype(int).tolist())

    def _parts(self, ranks: Ranks, cut: int, plan: Plan) -> dict[str, int]:
        """Groups of every module for one of a cut of a mean batch."""
        rules, parts = self._rules, {}
        for m, shape in plan.buckets[0].shapes:
            room = shape.rows if m in rules.profile.piece_tokens else shape.size
            share = rules.volumes[m].mean * ROOM / (cut * ranks.data * room)
            needed = max(1, math.ceil(share - 1e-9))
            parts[m] = min(needed, plan.fan_in) if m in plan.divided else 1
        return parts

    def _group_s(self, ranks: Ranks, plan: Plan, parts: dict[str, int]) -> float:
        """Seconds of so many groups of every module, on the mean rank."""
        rules = self._rules
        total_s = 0.0
        for m, shape in plan.buckets[0].shapes:
            one_s = module_s(rules, m, ranks.model, shape.rows, shape.tokens)
            total_s += float(one_s) * parts[m]
        size, cores = ranks.data * ranks.model, rules.profile.concurrency
        return total_s * max(1 / ranks.count, min(size, cores) / cores)

    def _plan(self, ranks: Ranks, bucket: Bucket) -> Plan:
        plan = as_plan(self._placements[ranks], POLICY, (bucket,), self._rules)
        return with_sub_microbatches(plan, self._rules)

    def _made(self, known: _Known) -> list[Ranked]:
        """The candidate with the cheapest options that memory holds; nothing where none do."""
        evaluator, name, plan = self._evaluator, self._placements[known.ranks].name, known.plan
        if not evaluator.fits(plan):
            plan = evaluator.with_cheapest_options(plan)
        if not evaluator.fits(plan):
            self.nearest.append((evaluator.most_bytes(plan), f"{name}, {saving_words(plan)}"))
            return []
        pairs = {
            m: int(group_pairs(self._rules.volumes[m], np.array(known.cut * n), known.ranks.data))
            for m, n in known.parts.items()
        }
        uniform = evaluator.uniform(plan, pairs, known.parts)
        return [
            Ranked(
                POLICY, name, known.cut, plan, known.bound_s, known.most, uniform, known.groups
            )
        ]  # fmt: skip


def _none(n_devices: int, config: PlanConfig, n_layers: dict[str, int]) -> str:
    shallow = min(n_layers, key=n_layers.__getitem__)
    return (
        f"policy dip has no placement on {n_devices} devices: 2 to plan.max_stage="
        f"{config.max_stage} ranks of equal size each hold a layer of every module, and "
        f"{shallow!r} has {n_layers[shallow]}; change plan.devices or plan.max_stage, or use "
        "plan.policy dflop or orch"
    )
