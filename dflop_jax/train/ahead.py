"""The plan that a run would have with one host (or process) less, searched while its devices train.

The search runs in a child process of low priority, as that for other samples does (`redecide`), and
what it finds is kept in the run folder (`recount`), where the run looks for it when it has so many
processes. All processes find it there, and compile its programs (`programs_ahead`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dflop_jax.cluster import told
from dflop_jax.plan.pricing import plan_prices
from dflop_jax.plan.replan import Question
from dflop_jax.records import Plan, PriceList, Profile
from dflop_jax.train.meta import planned_under, same_value
from dflop_jax.train.planning import search_facts
from dflop_jax.train.prepare import Workplace
from dflop_jax.train.programs_ahead import ProgramsAhead
from dflop_jax.train.recount import DEVICES, PROCESSES, KnownPlan, find_plan, keep_plan, recounted
from dflop_jax.train.redecide import PlanSearch


class PlanAhead:
    """Process 0's search for the plan of fewer processes, and every process's part of its programs;
    nothing where the run would not go on with fewer."""

    def __init__(self, place: Workplace, profile: Profile, say: Callable[[str], None]):
        self._place, self._say = place, say
        self._fewer = fewer = told.fewer_processes()
        self._profile, self._under = profile, {}
        self._search: PlanSearch | None = None
        self._programs: ProgramsAhead | None = None
        if fewer:
            n = len(place.devices)
            n_fewer = n // place.peers.count * fewer
            self._profile = recounted(profile, n, n_fewer)
            self._under = planned_under(place) | {PROCESSES: fewer, DEVICES: n_fewer}
            self._programs = ProgramsAhead(place, fewer, n_fewer, self._found, say)
        self._searches = bool(fewer) and place.peers.is_hub

    def look(self) -> None:
        """A step is done: begin to search, or keep what was found."""
        if self._programs:
            self._programs.look()
        if not self._searches:
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
        """End what is under way."""
        if self._programs:
            self._programs.close()
        self._close_search()

    def _found(self) -> Plan | None:
        """The plan for fewer, once it is kept."""
        known = find_plan(self._place.config.run_dir, self._under, same_value)
        return known.plan if known else None

    def _begin(self) -> None:
        if self._found():
            self._searches = False
            return
        facts, n = search_facts(self._place, self._profile), self._under[DEVICES]
        config = replace(facts.config, node=min(facts.config.node, n))
        facts = replace(facts, n_devices=n, processes=facts.processes[:n], config=config)
        self._search = PlanSearch(Question(self._profile, None, facts))

    def _close_search(self) -> None:
        if self._search:
            self._search.close()
            self._search = None

    def _end(self, what: str) -> None:
        self._close_search()
        self._searches = False
        self._say(what)
