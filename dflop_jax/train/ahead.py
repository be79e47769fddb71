"""The plan that a run would have with one host (or process) less, searched while its devices train.

The search runs in a child process of low priority, as that for other samples does (`redecide`), and
what it finds is kept in the run folder (`recount`), where the run looks for it when it has so many
processes. Its programs are not compiled ahead: what jax keeps of a compiled program it finds again
by the numbers of the devices that it is for (jax 0.10.2 to 0.12; on CPUs), and those of another
number of processes exist only once these have met; and on GPUs compiling times kernels on devices,
which train.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dflop_jax.cluster import told
from dflop_jax.plan.pricing import plan_prices
from dflop_jax.plan.replan import Question
from dflop_jax.records import PriceList, Profile
from dflop_jax.train.meta import planned_under, same_value
from dflop_jax.train.planning import search_facts
from dflop_jax.train.prepare import Workplace
from dflop_jax.train.recount import DEVICES, PROCESSES, KnownPlan, find_plan, keep_plan, recounted
from dflop_jax.train.redecide import PlanSearch


class PlanAhead:
    """Process 0's search for the plan of fewer processes; nothing on the others, or where the run
    would not go on with fewer."""

    def __init__(self, place: Workplace, profile: Profile, say: Callable[[str], None]):
        self._place, self._say = place, say
        self._fewer = told.fewer_processes() if place.peers.is_hub else 0
        self._profile, self._under = profile, {}
        self._search: PlanSearch | None = None
        if self._fewer:
            n = len(place.devices)
            n_fewer = n // place.peers.count * self._fewer
            self._profile = recounted(profile, n, n_fewer)
            self._under = planned_under(place) | {PROCESSES: self._fewer, DEVICES: n_fewer}

    def look(self) -> None:
        """A step is done: begin to search, or keep what was found."""
        if not self._fewer:
            return
        if self._search is None:
            self._begin()
        elif better := self._search.answer:
            if better.plan:
                prices = PriceList.of(plan_prices(better.plan.layout, self._profile.model))
                keep_plan(self._place.config.run_dir, KnownPlan(self._under, better.plan, prices))
                self._end(f"the plan for {self._fewer} processes is ready")
            else:
                self._end(f"with {self._fewer} processes the run would not go on: {better.why}")

    def close(self) -> None:
        """End a search that is under way."""
        if self._search:
            self._search.close()
            self._search = None

    def _begin(self) -> None:
        if find_plan(self._place.config.run_dir, self._under, same_value):
            self._fewer = 0
            return
        facts, n = search_facts(self._place, self._profile), self._under[DEVICES]
        config = replace(facts.config, node=min(facts.config.node, n))
        facts = replace(facts, n_devices=n, processes=facts.processes[:n], config=config)
        self._search = PlanSearch(Question(self._profile, None, facts))

    def _end(self, what: str) -> None:
        self.close()
        self._fewer = 0
        self._say(what)
