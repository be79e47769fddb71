"""Evaluation of plans: the scheduler schedules sampled batches, and the simulator runs them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from dflop_jax.config import PlanConfig
from dflop_jax.plan import memory
from dflop_jax.plan.memory import with_options
from dflop_jax.plan.module_tables import SearchContext
from dflop_jax.profile.cost_model import CostModel, layout_prices
from dflop_jax.records import (
    NO_GROUP,
    REDUCE,
    UPDATE,
    Bucket,
    Layout,
    Load,
    ModelProfile,
    Plan,
    Prices,
    ProgramId,
    Schedule,
    Shape,
    Task,
    Trace,
)
from dflop_jax.schedule import WORK_PER_S, Capacity, capacity_of, quick_schedule, schedule_batch
from dflop_jax.schedule.balance_problem import ROUNDING
from dflop_jax.schedule.batch import Batch, drifted_batches, sample_batches
from dflop_jax.schedule.bucket_search import min_groups
from dflop_jax.schedule.buckets.sizes import oversize_samples
from dflop_jax.schedule.costs import segment_directions
from dflop_jax.schedule.memory_plan import peak_residual_bytes
from dflop_jax.schedule.rank_permutation import exchange_capacities
from dflop_jax.simulate.steps import Noise, simulate_schedules, simulate_step, with_list_order
from dflop_jax.simulate.task_graph import in_flight_changes, in_flight_limit, submesh_resources
from dflop_jax.simulate.task_order import peak_groups_in_flight

LOOKAHEADS = (1, 2, 4)  # groups in flight beyond 1F1B's
_MIN_LOOKAHEAD_GAIN = 0.005  # share of the makespan that a longer lookahead must save
# Minimum number of samples in an evaluation; the batches are limited to the second number or twice
# the number of sampled batches.
_MIN_EVALUATED_SAMPLES, _MAX_EVALUATED_BATCHES = 512, 8
# Maximum scheduler work units per batch of an evaluation or round. With 300, some plans' schedules
# of 256 samples are up to 7% longer than with 4,000, others less, and the wrong plan seems fastest.
ROUND_WORK = 1_000
_RANKING_WORK = ROUND_WORK // 10  # the same while plans are ranked
# Share of the step time that the scheduler may use to prepare a later step: on its own core, and on
# a core that also serves as a device.
_SOLVER_SHARE, _SOLVER_SHARE_OF_DEVICE = 0.5, 0.1


def work_budget(step_s: float, *, shares_cores: bool) -> int:
    """Return the scheduler's work units per batch that overlap with a step of `step_s`."""
    share = _SOLVER_SHARE_OF_DEVICE if shares_cores else _SOLVER_SHARE
    return max(1, int(share * step_s * WORK_PER_S))


class PlanEvaluator:
    """Evaluator that schedules and simulates the same sampled batches for every plan.

    It ranks candidates by `batches`, compares them by rounds of batches, with drifted shares of
    media if `plan.drift` > 0, and predicts from `evaluation_batches`. Methods take the prices of a
    plan's own programs; None: prices from the profile.
    """

    def __init__(
        self, context: SearchContext, loads: Sequence[Load], batches: Sequence[Sequence[Load]]
    ):
        self.context, self.loads, self.batches = context, loads, batches
        global_batch, n_sampled = context.spec.global_batch, context.spec.n_batches
        # Small batches differ most in their number of groups.
        max_batches = max(2 * n_sampled, _MAX_EVALUATED_BATCHES)
        n = min(max(n_sampled, _MIN_EVALUATED_SAMPLES // global_batch), max_batches)
        self.evaluation_batches = sample_batches(loads, global_batch, n, seed=1)
        one_rank = Capacity(dict.fromkeys(context.n_layers, 1))  # `min_groups` replaces it
        self._packed = [Batch(b, one_rank) for b in batches]
        self._groups: dict[tuple[object, ...], float] = {}
        self._rounds: dict[int, list[list[Load]]] = {}

    def with_less_memory(self, n_bytes: float) -> PlanEvaluator:
        """Return an evaluator with the memory limit, if there is one, reduced by `n_bytes`."""
        limit = self.context.spec.memory_bytes
        return self.with_spec(memory_bytes=max(1.0, limit - n_bytes) if limit else 0.0)

    def with_spec(self, **changes: Any) -> PlanEvaluator:
        """Return an evaluator of the same batches with `changes` of its search spec."""
        evaluator, context = copy(self), self.context
        evaluator.context = replace(context, spec=replace(context.spec, **changes))
        return evaluator

    @property
    def config(self) -> PlanConfig:
        """The planner's settings with all limits resolved (above 0)."""
        return self.context.spec.config

    def max_peak_bytes(self, plan: Plan) -> float:
        """Return an upper bound of the maximum bytes per device for any number of groups."""
        return max(self.peak_bytes_limit(plan).values())

    def peak_bytes_limit(self, plan: Plan) -> dict[str, float]:
        """Return an upper bound of each submesh's bytes per device for any number of groups."""
        return self.peak_bytes(plan.layout, in_flight_limit(plan))

    def peak_bytes(self, layout: Layout, in_flight: Mapping[str, int]) -> dict[str, float]:
        """Return each submesh's bytes per device, given each segment's groups in flight."""
        trainable = self.context.trainable(layout)
        return memory.peak_bytes(layout, self.context.costs, in_flight, trainable)

    def fits(self, plan: Plan) -> bool:
        limit = self.context.spec.memory_bytes
        return not limit or self.max_peak_bytes(plan) <= limit

    def busy_s(self, layout: Layout) -> float:
        """Return the total task seconds of a mean batch in the largest shapes."""
        prices, trainable = self._priced(layout)
        n, directions = self._groups_per_mean_batch(layout), segment_directions(layout, trainable)
        ends = (Task(s, NO_GROUP, d) for s in trainable for d in (REDUCE, UPDATE))
        total_s = sum(prices.step_end[task] for task in ends)
        for s in layout.segments:
            shapes = layout.shapes(s.module)
            programs = [ProgramId(s.name, max(shapes), d) for d in directions[s.name] if shapes]
            volume, n_ranks = self.context.volumes[s.module], n * layout.data_ranks(s.module)
            n_subs = layout.fan_in if s.module in layout.divided else 1
            content = [amount / n_ranks / n_subs for amount in volume.content]
            total_s += n * n_subs * sum(prices.programs[p].seconds(content) for p in programs)
        return total_s

    def _groups_per_mean_batch(self, layout: Layout) -> float:
        """Return the number of groups of the largest shapes that a mean batch needs."""
        n_groups = 1.0
        for m in layout.modules:
            rows = [self.context.group_capacity(m, s.rows, s.tokens) for s in layout.shapes(m)]
            capacity = max(rows, default=0) * layout.data_ranks(m) * layout.group_size
            capacity *= layout.fan_in if m in layout.divided else 1
            mean = self.context.volumes[m].mean_per_batch
            n_groups = max(n_groups, mean / capacity if capacity else 0.0)
        return n_groups

    def with_cheapest_options(self, plan: Plan) -> Plan:
        """Return the plan with each module's fastest options that fit; else the smallest."""
        if not self.fits(plan):
            for m in plan.layout.modules:
                plan = min(self._with_each_option(plan, m), key=self.max_peak_bytes)
        if not self.fits(plan):
            return plan
        for m in plan.layout.modules:
            by_price = sorted(self._with_each_option(plan, m), key=lambda p: self.busy_s(p.layout))
            plan = next(filter(self.fits, by_price))
        return plan

    def _with_each_option(self, plan: Plan, module: str) -> list[Plan]:
        return [with_options(plan, {module: o}) for o in self.context.options(module)]

    def count_groups(self, layout: Layout, batch: int) -> float:
        """Return the scheduler's number of groups for a batch with the layout's one bucket. A last
        group in a smaller bucket counts as that bucket's share; a group's sub-microbatches count
        once. Results are cached by data-parallel degrees."""
        shares = buckets_with_shares(layout, self.context)
        ranks = tuple(capacity_of(layout).ranks.items())
        key = (ranks, layout.group_size, tuple(shares), layout.fan_in, batch)
        if key not in self._groups:
            layout = replace(layout, buckets=tuple(shares))
            n_groups = min_groups(self._packed[batch], layout, [*shares.values()], _RANKING_WORK)
            self._groups[key] = n_groups
        return self._groups[key]

    def evaluate(self, plan: Plan, expected_step_s: float, prices: Prices | None = None) -> Plan:
        """Return the plan with predictions, lookahead and work budget, given a rough step time."""
        plan, priced = self.with_lookahead(plan, prices), self._priced(plan.layout, prices)
        budget = partial(work_budget, shares_cores=self.context.profile.shares_cores)
        work, batches = min(budget(expected_step_s), ROUND_WORK), self.evaluation_batches
        schedules = [
            schedule_batch(b, plan, *priced, step=i, work=work) for i, b in enumerate(batches)
        ]
        if prices is None:  # else programs are already compiled for the plan's capacities
            capacities = exchange_capacities(plan.layout, schedules, batches)
            plan = plan.with_layout(exchange_capacities=capacities)
        traces = [simulate_step(plan, s, *priced) for s in schedules]
        plan = self._with_prediction(plan, schedules, traces)
        return plan.with_scheduling(work_budget=budget(plan.predicted.makespan_s))

    def with_lookahead(self, plan: Plan, prices: Prices | None = None) -> Plan:
        """Return the plan with the lookahead that fits and is fastest under list scheduling; a
        searched order would favour the lookahead that it was searched for. Unchanged if groups
        share the free memory or all segments run on one set of devices."""
        scheduling = plan.scheduling
        is_alone = len(set(submesh_resources(plan.layout).values())) == 1
        if scheduling.grouping != "balanced" or scheduling.residuals or is_alone:
            return plan
        priced = self._priced(plan.layout, prices)
        batches = self.evaluation_batches[: max(2, round(len(self.evaluation_batches) / 2))]
        schedules = [quick_schedule(b, plan, *priced, _RANKING_WORK) for b in batches]

        def list_scheduled_s(plan: Plan) -> float:
            ordered = (with_list_order(plan, replace(s, order=()), *priced) for s in schedules)
            return float(np.mean([s.makespan_s for s in ordered]))

        fastest, best_s = plan, list_scheduled_s(plan)
        for lookahead in LOOKAHEADS:
            longer = plan.with_scheduling(lookahead=lookahead)
            if not self.fits(longer):
                break
            if (longer_s := list_scheduled_s(longer)) < (1 - _MIN_LOOKAHEAD_GAIN) * best_s:
                fastest, best_s = longer, longer_s
        return fastest

    def round_batches(self, number: int) -> list[list[Load]]:
        """Return a batch with the data's mix of media and, if `plan.drift` > 0, a drifted one."""
        if number not in self._rounds:
            n = self.context.spec.global_batch
            batches = sample_batches(self.loads, n, 1, seed=2 + number)
            if self.config.drift:
                modules, seed = tuple(self.context.n_layers), number // 2
                # One seed gives both directions of a drift.
                drifted = drifted_batches(self.loads, modules, n, 2, seed=seed)
                batches.append(drifted[number % 2])
            self._rounds[number] = batches
        return self._rounds[number]

    def simulate_round(self, plan: Plan, number: int) -> float:
        """Return a round's step seconds; the drifted batch has the weight `plan.drift`."""
        priced = self._priced(plan.layout)
        plain_s, *drifted_s = (
            quick_schedule(b, plan, *priced, ROUND_WORK).makespan_s
            for b in self.round_batches(number)
        )
        return (1 - self.config.drift) * plain_s + self.config.drift * sum(drifted_s)

    def _priced(self, layout: Layout, prices: Prices | None = None) -> tuple[Prices, list[str]]:
        """Return (prices, trainable segments) of a layout."""
        return prices or self.context.price_layout(layout), self.context.trainable(layout)

    def _with_prediction(
        self, plan: Plan, schedules: Sequence[Schedule], traces: Sequence[Trace]
    ) -> Plan:
        if plan.scheduling.residuals:  # a segment's groups differ in their residuals
            resources = submesh_resources(plan.layout)
            residual_bytes = [peak_residual_bytes(plan, s) for s in schedules]
            peak_bytes = {
                name: n_bytes + max(by_resource[resources[name]] for by_resource in residual_bytes)
                for name, n_bytes in self.peak_bytes(plan.layout, {}).items()
            }
        else:
            depths = [peak_groups_in_flight(s.order) for s in schedules]
            names = [s.name for s in plan.layout.segments]
            in_flight = {name: max(d.get(name, 0) for d in depths) for name in names}
            peak_bytes = self.peak_bytes(plan.layout, in_flight)
        makespan_s = float(np.mean([t.makespan_s for t in traces]))
        busy = [trace.busy_fraction() for trace in traces]
        meshes = [m.name for m in plan.layout.submeshes]
        predicted = replace(
            plan.predicted,
            makespan_s=makespan_s,
            busy_fraction={m: float(np.mean([b.get(m, 0.0) for b in busy])) for m in meshes},
            peak_bytes=peak_bytes,
            chosen_by_s=makespan_s,
            priced_by=self.context.profile.priced_by,
        )
        return replace(plan, predicted=predicted)


def buckets_with_shares(layout: Layout, context: SearchContext) -> dict[Bucket, float]:
    """Return a layout's one bucket and smaller ones for a batch's last group, largest first, each
    with its share of the largest.

    A smaller bucket has a share of the rows, rounded up, or of the tokens if there is one packed
    row, which still holds the longest piece. Its share is the maximum over modules that shrink.
    """
    (largest,) = layout.buckets
    bucket_shares = {largest: 1.0}
    for share in reversed(context.bucket_shares[:-1]):
        shapes: dict[str, Shape | None] = {}
        token_shares = []
        for m, s in largest.shapes:
            rows, tokens = math.ceil(s.rows * share - ROUNDING), s.tokens
            if s.rows == 1 and m not in context.profile.piece_tokens:
                multiple = context.spec.token_multiple
                scaled = math.ceil(tokens * share / multiple - ROUNDING) * multiple
                tokens = min(tokens, max(scaled, context.row_tokens(m)))
            shapes[m] = smaller = s if m in layout.divided else Shape(rows, tokens)
            token_shares += [smaller.size / s.size] * (smaller != s)
        bucket_shares.setdefault(Bucket.from_shapes(shapes), max(token_shares, default=1.0))
    return bucket_shares


def simulate(
    plan: Plan,
    batches: Sequence[Sequence[Load]],
    profile: ModelProfile,
    *,
    trainable: Collection[str] | None = None,
    noise: Noise | None = None,
) -> Trace:
    """Schedule global batches (loads) and simulate them one after another with a profile's times.

    Returns one trace of all steps with consecutive group numbers. Segments that are not `trainable`
    (None: all are) have no optimizer. `noise` as for `simulate_step`; schedules are made without.
    ValueError: a sample fits no bucket, or the profile lacks a degree of the plan.
    """
    names = [s.name for s in plan.layout.segments] if trainable is None else trainable
    prices = layout_prices(plan.layout, CostModel(profile), plan.scheduling.grouping)
    schedules = [schedule_batch(b, plan, prices, names, step=i) for i, b in enumerate(batches)]
    return simulate_schedules(plan, schedules, prices, names, noise=noise)


def filter_fitting_loads(plan: Plan, loads: Sequence[Load]) -> list[Load]:
    """Return the samples that fit into the plan's buckets; ValueError: none fits."""
    large = set(oversize_samples(loads, plan))
    if len(large) == len(loads):
        raise ValueError("no sample of this data fits into the plan's buckets; make a plan for it")
    return [load for i, load in enumerate(loads) if i not in large]


def fullest_schedule(
    plan: Plan, loads: Sequence[Load], global_batch: int, prices: Prices, trainable: Collection[str]
) -> Schedule:
    """Return the schedule with the most tokens in flight at once, of a few sampled batches."""
    fitting, n_batches = filter_fitting_loads(plan, loads), _MAX_EVALUATED_BATCHES // 2
    batches = sample_batches(fitting, global_batch, n_batches)
    schedules = (schedule_batch(b, plan, prices, trainable) for b in batches)
    return max(schedules, key=_max_live_tokens)


def _max_live_tokens(schedule: Schedule) -> int:
    """Return a step's maximum number of tokens in groups between forward and backward."""
    changes = zip(schedule.order, in_flight_changes(schedule.order), strict=True)
    tokens = (change and change * schedule.groups[t.group].shape.size for t, change in changes)
    return max(accumulate(tokens), default=0)
