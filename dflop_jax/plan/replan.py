"""Whether another plan is faster for the samples of late: asked while the devices train.

Answered in a child process of its own. It is started as the schedule worker is and imports no JAX
either, but it is not that process: a search takes as long as many schedules, which a step would
then wait for, and `schedule` imports nothing of `plan`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from dflop_jax.children import begin, ignore_signals
from dflop_jax.config import PlanConfig
from dflop_jax.plan.predict import simulate
from dflop_jax.plan.search import SearchResult, search_plan
from dflop_jax.plan.spec import SearchSpec
from dflop_jax.records import (
    Load,
    Plan,
    Profile,
    Remat,
    SegmentPlan,
    SubmeshPlan,
    Zero,
)
from dflop_jax.schedule.shapes.spare import beyond

# Added to the child's niceness (0 to 19): on hosts whose cores are the devices these go first.
_NICENESS = 10
_NO_PLAN = "no plan for the samples of late"


@dataclass(frozen=True)
class SearchFacts:
    """A `SearchSpec` without functions, to be sent to another process.

    Attributes:
      frozen: (module, first layer, end) of segments without trainable parameters.
      processes: of each device, where those of several processes form a submesh only if they are of
        one each; empty: any devices do.
    """

    n_devices: int
    global_batch: int
    config: PlanConfig
    memory_bytes: float
    remat: Remat | Literal["auto"]
    zero: Zero | Literal["auto"]
    token_multiple: int
    frozen: tuple[tuple[str, int, int], ...]
    processes: tuple[int, ...]

    def spec(self) -> SearchSpec:
        frozen, processes = set(self.frozen), self.processes

        def trains(s: SegmentPlan) -> bool:
            return (s.module, s.start, s.stop) not in frozen

        def allowed(m: SubmeshPlan) -> bool:
            joined = processes[m.first : m.devices.stop]
            return not processes or len(set(joined)) in (1, len(joined))

        return SearchSpec(
            self.n_devices,
            self.global_batch,
            self.config,
            self.memory_bytes,
            self.remat,
            self.zero,
            self.token_multiple,
            trains,
            allowed,
        )


@dataclass(frozen=True)
class Question:
    """Is there a better plan than `plan` for the data of `profile`, the samples of late batches in
    their order? Without a plan: which is the best?"""

    profile: Profile
    plan: Plan | None
    facts: SearchFacts


@dataclass(frozen=True)
class BetterPlan:
    """The plan that saves a `share` of a step by simulation (0 where it was compared with none);
    None: there is none, and why."""

    plan: Plan | None = None
    share: float = 0.0
    why: str = ""


def better_plan(
    question: Question, search: Callable[..., SearchResult] = search_plan
) -> BetterPlan:
    """Search, and simulate the plan in use and the one that was chosen on the latest batches."""
    plan, profile, facts = question.plan, question.profile, question.facts
    data = profile.data
    try:
        best = search(profile.model, data, facts.spec()).plan
    except ValueError as e:
        return BetterPlan(why=f"no plan: {e}" if plan is None else f"{_NO_PLAN}: {e}")
    if plan is None:
        return BetterPlan(best)
    if best.layout == plan.layout:
        return BetterPlan(why="the plan is still the best")
    known = (*data.loads, *data.tail)
    if lost := {*beyond(known, best)} - {*beyond(known, plan)}:
        return BetterPlan(why=f"the best plan leaves out {len(lost)} samples that are trained on")
    n = facts.global_batch
    batches = [data.loads[i : i + n] for i in range(0, len(data.loads), n)]
    last = batches[-facts.config.sampled_batches :]
    now_s, then_s = _simulated_s((plan, best), last, profile)
    if then_s >= now_s:
        return BetterPlan(why="the best plan for them is not faster")
    return BetterPlan(best, 1 - then_s / now_s)


def _simulated_s(
    plans: Sequence[Plan],
    batches: Sequence[Sequence[Load]],
    profile: Profile,
) -> list[float]:
    """Seconds of each plan for what all have room for of some batches."""
    held = []
    for batch in batches:
        large = {i for plan in plans for i in beyond(batch, plan)}
        held.append([load for i, load in enumerate(batch) if i not in large])
    return [simulate(p, held, profile.model).makespan_s for p in plans]


def main() -> None:
    """Answer one question; ends when its stdin closes, so it does not outlive its parent."""
    ignore_signals()
    lines, out = begin()
    os.nice(_NICENESS)
    if not (line := lines.readline()):
        return
    threading.Thread(target=_end_with_parent, args=(lines.fileno(),), daemon=True).start()
    out.write(msgspec.json.encode(better_plan(msgspec.json.decode(line, type=Question))) + b"\n")
    out.flush()


def _end_with_parent(stdin: int) -> None:
    os.read(stdin, 1)  # nothing comes but the end
    os._exit(0)
