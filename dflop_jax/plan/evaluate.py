"""What a plan would cost: sampled batches scheduled by the real scheduler and simulated on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial

import numpy as np

from dflop_jax.config import PlanConfig
from dflop_jax.plan import memory
from dflop_jax.plan.estimate import Rules
from dflop_jax.plan.options import with_options
from dflop_jax.plan.uniform import ladder_of
from dflop_jax.profile.prices import layout_prices
from dflop_jax.records import (
    NO_GROUP,
    REDUCE,
    UPDATE,
    Layout,
    Load,
    Plan,
    Prices,
    ProgramId,
    Schedule,
    Task,
    Trace,
)
from dflop_jax.schedule import (
    WORK_PER_S,
    capacity_of,
    quick_schedule,
    schedule_batch,
)
from dflop_jax.schedule.batch import Batch
from dflop_jax.schedule.bucket_search import min_groups
from dflop_jax.schedule.costs import segment_directions
from dflop_jax.schedule.memory_plan import peak_residual_bytes
from dflop_jax.schedule.rank_permutation import exchange_rooms
from dflop_jax.schedule.sampled_batches import drifted_batches, sample_batches
from dflop_jax.simulate.steps import simulate_step, with_list_order
from dflop_jax.simulate.task_graph import in_flight_limit, submesh_resources
from dflop_jax.simulate.task_order import peak_groups_in_flight

LOOKAHEADS = (1, 2, 4)  # groups in flight beyond 1F1B's
_WORTH_MEMORY = 0.005  # share of the makespan that a longer lookahead has to bring
_RANK_WORK = 100  # units for a batch of a plan that is ranked
# Samples that give a plan's figures at least, in up to so many batches or twice the sampled ones.
_FIGURED, _FIGURED_BATCHES = 512, 8
# Most units for a batch that gives a plan's figures, and for one by which plans are compared: with
# 300 schedules of 256 samples are up to 7% longer than with 4,000, those of other plans less, and
# another plan seems the fastest.
TRIAL_WORK = 1_000
_LOOKAHEAD_BATCHES = 0.5  # of the unseen ones, by which the lookahead is chosen
# Of a step, in which the solver of a later one shall be done: where it has a core of its own, and
# where it takes its seconds from a device, which is a core of the host.
_SOLVER_SHARE, _SOLVER_SHARE_OF_DEVICE = 0.5, 0.1


def work_budget(step_s: float, *, shares_cores: bool) -> int:
    """Units of the scheduler's work that a step of so many seconds hides; `shares_cores` as in
    `ModelProfile`."""
    share = _SOLVER_SHARE_OF_DEVICE if shares_cores else _SOLVER_SHARE
    return max(1, int(share * step_s * WORK_PER_S))


class Evaluator:
    """Schedules and simulates the same sampled batches on every plan.

    Candidates are ranked by `batches`; what comes of that is compared by those of trials, some of
    which hold other shares of media, and gets its figures from `unseen` ones.
    """

    def __init__(
        self,
        rules: Rules,
        loads: Sequence[Load],
        batches: Sequence[Sequence[Load]],
    ):
        self.rules, self.loads, self.batches = rules, loads, batches
        global_batch, n_sampled = rules.spec.global_batch, rules.spec.n_batches
        # Small batches differ most, and with them the number of groups.
        most = max(2 * n_sampled, _FIGURED_BATCHES)
        n = min(max(n_sampled, _FIGURED // global_batch), most)
        self.unseen = sample_batches(loads, global_batch, n, seed=1)
        self._packed = [Batch(b, tuple(rules.n_layers)) for b in batches]
        self._groups: dict[tuple[object, ...], float] = {}
        self._trials: dict[int, list[list[Load]]] = {}

    def with_less_memory(self, n_bytes: float) -> Evaluator:
        """The same for devices with so many bytes less to fill, where their memory is limited."""
        less, spec = copy(self), self.rules.spec
        left = max(1.0, spec.memory_bytes - n_bytes) if spec.memory_bytes else 0.0
        less.rules = replace(self.rules, spec=replace(spec, memory_bytes=left))
        return less

    @property
    def config(self) -> PlanConfig:
        """The settings, their limits as the job needs."""
        return self.rules.spec.config

    def prices(self, layout: Layout) -> Prices:
        return layout_prices(layout, self.rules.costs)

    def most_bytes(self, plan: Plan) -> float:
        """Bytes of the device that needs the most, however many groups a batch takes."""
        return max(self.most_by_submesh(plan).values())

    def most_by_submesh(self, plan: Plan) -> dict[str, float]:
        """Bytes of each submesh's devices, however many groups a batch takes."""
        return self.peak_bytes(plan.layout, in_flight_limit(plan))

    def peak_bytes(self, layout: Layout, in_flight: Mapping[str, int]) -> dict[str, float]:
        """Of each submesh, with so many groups kept by each segment."""
        return memory.peak_bytes(layout, self.rules.costs, in_flight, self.rules.trainable(layout))

    def fits(self, plan: Plan) -> bool:
        limit = self.rules.spec.memory_bytes
        return not limit or self.most_bytes(plan) <= limit

    def busy_s(self, layout: Layout) -> float:
        """Seconds of all tasks of a mean batch in groups of the largest shapes, and of the step's
        end: what tells options of a placement apart."""
        prices, trainable = self.prices(layout), self.rules.trainable(layout)
        n = self._mean_groups(layout)
        tasks = segment_directions(layout, trainable)
        ends = (Task(s, NO_GROUP, d) for s in trainable for d in (REDUCE, UPDATE))
        total_s = sum(prices.step_end[task] for task in ends)
        for s in layout.segments:
            shapes = layout.shapes(s.module)
            programs = [ProgramId(s.name, max(shapes), d) for d in tasks[s.name] if shapes]
            volume, share = self.rules.volumes[s.module], n * layout.data_ranks(s.module)
            parts = layout.fan_in if s.module in layout.divided else 1
            content = [amount / share / parts for amount in volume.content]
            total_s += n * parts * sum(prices.programs[p].of(content) for p in programs)
        return total_s

    def _mean_groups(self, layout: Layout) -> float:
        """Groups of the largest shapes that hold a mean batch."""
        n_groups = 1.0
        for m in layout.modules:
            rooms = (self.rules.room(m, s.rows, s.tokens) for s in layout.shapes(m))
            room = max(rooms, default=0)
            room *= layout.data_ranks(m) * layout.group_size
            room *= layout.fan_in if m in layout.divided else 1
            n_groups = max(n_groups, self.rules.volumes[m].mean / room if room else 0.0)
        return n_groups

    def with_cheapest_options(self, plan: Plan) -> Plan:
        """The plan with the cheapest options that its buckets leave memory for, module by module;
        with those that need least where nothing fits."""
        if not self.fits(plan):
            for m in plan.layout.modules:
                plan = min(self._with_each_option(plan, m), key=self.most_bytes)
        if not self.fits(plan):
            return plan
        for m in plan.layout.modules:
            by_price = sorted(self._with_each_option(plan, m), key=lambda p: self.busy_s(p.layout))
            plan = next(filter(self.fits, by_price))
        return plan

    def _with_each_option(self, plan: Plan, module: str) -> list[Plan]:
        return [with_options(plan, {module: o}) for o in self.rules.options(module)]

    def n_groups(self, layout: Layout, batch: int) -> float:
        """Groups that the scheduler makes of a batch in a layout of one bucket, the last as the
        part of it that will do; those that feed one together count once. It is the same for all
        layouts of the same data ranks."""
        ladder, capacity = ladder_of(layout, self.rules), capacity_of(layout)
        key = (capacity, tuple(ladder), layout.fan_in, batch)
        if key not in self._groups:
            layout, shares = replace(layout, buckets=tuple(ladder)), list(ladder.values())
            self._groups[key] = min_groups(self._packed[batch], layout, shares, _RANK_WORK)
        return self._groups[key]

    def evaluate(self, plan: Plan, about_s: float, prices: Prices | None = None) -> Plan:
        """The plan with its predicted figures and budget of work, and with the lookahead that makes
        it fastest.

        Args:
          about_s: what a step takes about, which says how much work hides behind it.
          prices: of the plan's own programs; None: by the profile.
        """
        is_compiled = prices is not None
        prices = prices or self.prices(plan.layout)
        trainable = self.rules.trainable(plan.layout)
        plan = self.with_lookahead(plan, prices)
        hidden_work = partial(work_budget, shares_cores=self.rules.profile.shares_cores)
        work = min(hidden_work(about_s), TRIAL_WORK)
        schedules = [
            schedule_batch(b, plan, prices, trainable, step=i, work=work)
            for i, b in enumerate(self.unseen)
        ]
        if not is_compiled:  # else it has the rooms that its programs are for
            plan = plan.with_layout(
                exchange_rooms=exchange_rooms(plan.layout, schedules, self.unseen)
            )
        traces = [simulate_step(plan, s, prices, trainable) for s in schedules]
        plan = self._predicted(plan, schedules, traces)
        return plan.with_scheduling(work_budget=hidden_work(plan.predicted.makespan_s))

    def with_lookahead(self, plan: Plan, prices: Prices | None = None) -> Plan:
        """The plan with the lookahead that makes it fastest by list scheduling, and that memory
        holds: an order that was searched for one lookahead is no measure of the others.

        As it is where groups share out what memory is left, for which the lookahead is chosen
        already, and on one set of devices, where no order is faster.
        """
        scheduling, alone = plan.scheduling, len(set(submesh_resources(plan.layout).values())) == 1
        if scheduling.grouping != "balanced" or scheduling.kept or alone:
            return plan
        prices, trainable = prices or self.prices(plan.layout), self.rules.trainable(plan.layout)
        batches = self.unseen[: max(2, round(_LOOKAHEAD_BATCHES * len(self.unseen)))]
        schedules = [quick_schedule(b, plan, prices, trainable, _RANK_WORK) for b in batches]

        def list_scheduled_s(plan: Plan) -> float:
            each = (
                with_list_order(plan, replace(s, order=()), prices, trainable) for s in schedules
            )
            return float(np.mean([s.makespan_s for s in each]))

        best, best_s = plan, list_scheduled_s(plan)
        for lookahead in LOOKAHEADS:
            longer = plan.with_scheduling(lookahead=lookahead)
            if not self.fits(longer):
                break
            if (longer_s := list_scheduled_s(longer)) < (1 - _WORTH_MEMORY) * best_s:
                best, best_s = longer, longer_s
        return best

    def trial(self, number: int) -> list[list[Load]]:
        """The batches of a trial, of any number: one as the data are and, where `plan.drift`
        counts, a drifted one."""
        if number not in self._trials:
            n = self.rules.spec.global_batch
            batches = sample_batches(self.loads, n, 1, seed=2 + number)
            if self.config.drift:
                modules, seed = tuple(self.rules.n_layers), number // 2
                # Both directions of a drift come from one seed.
                both = drifted_batches(self.loads, modules, n, 2, seed=seed)
                batches.append(both[number % 2])
            self._trials[number] = batches
        return self._trials[number]

    def trial_s(self, plan: Plan, number: int, prices: Prices | None = None) -> float:
        """Seconds of a step by the batches of a trial, a share of which (`plan.drift`) are those of
        the drifted one.

        Args:
          prices: of the plan's own programs; None: by the profile.
        """
        prices, trainable = prices or self.prices(plan.layout), self.rules.trainable(plan.layout)
        plain_s, *drifted_s = (
            quick_schedule(b, plan, prices, trainable, TRIAL_WORK).makespan_s
            for b in self.trial(number)
        )
        return (1 - self.config.drift) * plain_s + self.config.drift * sum(drifted_s)

    def _predicted(
        self, plan: Plan, schedules: Sequence[Schedule], traces: Sequence[Trace]
    ) -> Plan:
        busy = [trace.busy_fraction() for trace in traces]
        depths = [peak_groups_in_flight(s.order) for s in schedules]
        if plan.scheduling.kept:  # groups of one segment differ in what they keep
            held = [peak_residual_bytes(plan, s) for s in schedules]
            peak_bytes = {
                name: n_bytes + max(h[submesh_resources(plan.layout)[name]] for h in held)
                for name, n_bytes in self.peak_bytes(plan.layout, {}).items()
            }
        else:
            in_flight = {
                s.name: max(d.get(s.name, 0) for d in depths) for s in plan.layout.segments
            }
            peak_bytes = self.peak_bytes(plan.layout, in_flight)
        makespan_s = float(np.mean([t.makespan_s for t in traces]))
        predicted = replace(
            plan.predicted,
            makespan_s=makespan_s,
            busy_fraction={
                m.name: float(np.mean([b.get(m.name, 0.0) for b in busy]))
                for m in plan.layout.submeshes
            },
            peak_bytes=peak_bytes,
            chosen_by_s=makespan_s,
            priced_by=self.rules.profile.priced_by,
        )
        return replace(plan, predicted=predicted)
