"""Whether another plan would now pay, by the samples that were trained on since the last look.

A plan is made for the data that the profile saw. Every `plan.redecide_every` steps process 0
compares what the data asked for of late with what a plan was last searched for. Where they differ
by more than chance a child process searches and simulates (`plan.replan`) while the devices train;
a later look takes its answer. The run changes plans where the steps that are then left save more
than the change costs: it saves, and goes on as a resumed run does under another plan, so that
losses agree to rounding. What it changes to is in the next checkpoint; a run that is killed before
that resumes under the plan that it had, one that ends before the answer is there just ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from dflop_jax.children import Child
from dflop_jax.plan.replan import BetterPlan, Question, better_plan
from dflop_jax.records import DataProfile, Load, Plan, Profile
from dflop_jax.report.progress import Progress
from dflop_jax.train.planning import search_facts
from dflop_jax.train.prepare import Workplace

# Standard errors by which means of samples differ that differ by more than chance; twice as many
# find a change of the data in four times as many steps.
_SURE_ERRORS = 3.0
_LEAST_GAIN = 0.03  # share of a step that a plan must save: less is within what predictions are off


@dataclass(frozen=True)
class NewPlan:
    """A plan that pays, and the profile that it was made from."""

    plan: Plan
    profile: Profile


def drift(profiled: Sequence[Load], seen: Sequence[Load]) -> float:
    """The largest change of a module's mean tokens, or of a feature of its content, over the
    larger of both; 0 where all are within chance."""
    largest = 0.0
    for m in _modules(profiled, seen):
        for amount in _amounts((*profiled, *seen), m):
            then, now = np.split(amount, [len(profiled)])
            error = float(np.sqrt(then.var() / len(then) + now.var() / len(now)))
            change = abs(float(now.mean() - then.mean()))
            if change > _SURE_ERRORS * error:
                largest = max(largest, change / max(now.mean(), then.mean()))
    return largest


def _amounts(loads: Sequence[Load], module: str) -> np.ndarray:
    """What each sample has of tokens and of each feature of a module's content, [1 + features,
    loads]."""
    n_features = max((len(c) for load in loads for c in load.content_of(module)), default=1)
    amounts = np.zeros((1 + n_features, len(loads)))
    for i, load in enumerate(loads):
        for tokens, content in zip(load.lengths(module), load.content_of(module), strict=True):
            amounts[:, i] += tokens, *content
    return amounts


def observed(known: DataProfile, seen: Sequence[Load], steps: range) -> DataProfile:
    """The profile of the samples of some steps; the largest that were known keep their room."""
    source = f"{known.source.split(', steps ')[0]}, steps {steps.start} to {steps.stop - 1}"
    tail = largest((*known.tail, *known.loads))
    return DataProfile(source, known.n_total, tuple(seen), tuple(tail))


def largest(loads: Sequence[Load]) -> list[Load]:
    """Those than which no other has as many tokens of every module, each once."""
    modules = _modules(loads)
    asks = {tuple(load.tokens(m) for m in modules): load for load in loads}
    front: list[tuple[int, ...]] = []
    for ask in sorted(asks, reverse=True):  # none before it is smaller in all
        if not any(all(a >= b for a, b in zip(other, ask, strict=True)) for other in front):
            front.append(ask)
    return [asks[ask] for ask in front]


def _modules(*loads: Sequence[Load]) -> list[str]:
    """Modules that some load has pieces of, in the order in which they first occur."""
    return list(dict.fromkeys(m for some in loads for load in some for m in load.pieces))


class PlanSearch:
    """A question under way in a child process."""

    def __init__(self, question: Question):
        self._child = Child(better_plan.__module__)
        self._answer: BetterPlan | None = None
        self._thread = threading.Thread(
            target=self._ask, args=(question,), name="plan-search", daemon=True
        )
        self._thread.start()

    @property
    def answer(self) -> BetterPlan | None:
        """The answer; None while it is searched."""
        return self._answer

    def wait(self) -> None:
        """Wait until the answer is there."""
        self._thread.join()

    def close(self) -> None:
        """End the child, whether it has answered or not."""
        self._child.kill()
        self.wait()

    def _ask(self, question: Question) -> None:
        self._child.tell(msgspec.json.encode(question))
        line = self._child.answer()
        self._child.kill()
        self._child.end()
        try:
            self._answer = msgspec.json.decode(line, type=BetterPlan)
        except msgspec.DecodeError:
            self._answer = BetterPlan(why="the search for another plan died")


class Redecider:
    """Looks whether another plan would pay; all processes look together, process 0 decides.

    Args:
      loads: what the data asks for of a step's batch, without a decoded sample: too large ones are
        not replaced.
      start_s: what starting under a plan takes: programs compiled and timed, parameters placed.
    """

    def __init__(
        self,
        place: Workplace,
        profile: Profile,
        plan: Plan,
        loads: Callable[[int], list[Load]],
        start_s: float,
        progress: Progress,
    ):
        self._place, self._plan = place, plan
        self._loads, self._start_s, self._progress = loads, start_s, progress
        self._profile = profile  # that a plan was last searched for
        self._changed = 0.0  # how far its samples are from those before
        self._search: PlanSearch | None = None

    def look(self, done: int, step_s: Sequence[float]) -> NewPlan | None:
        """Return what to change to after `done` steps, None to go on.

        Args:
          step_s: measured seconds of the steps since the last look, on process 0.
        """
        peers = self._place.peers
        new = self._decide(done, step_s) if peers.is_hub else None
        shared = peers.share(f"redecide/{done}", msgspec.json.encode(new))
        return msgspec.json.decode(shared, type=NewPlan | None)

    def close(self) -> None:
        """End a search that is under way."""
        if self._search:
            self._search.close()
            self._search = None

    def _decide(self, done: int, step_s: Sequence[float]) -> NewPlan | None:
        if self._search is None:
            self._compare(done)
            return None
        if (better := self._search.answer) is None:
            return None
        self.close()
        return self._weigh(done, better, step_s)

    def _compare(self, done: int) -> None:
        """Begin a search where samples are others than those that a plan was last searched for."""
        config = self._place.config
        n = -(-config.plan.profile_samples // config.train.global_batch)
        steps = range(max(0, done - min(n, config.plan.redecide_every)), done)
        seen = [load for step in steps for load in self._loads(step)]
        self._changed = drift(self._profile.data.loads, seen)
        if not self._changed:
            self._say(done, "samples are as those that were planned for")
            return
        data = observed(self._profile.data, seen, steps)
        self._profile = replace(self._profile, data=data)
        try:
            facts = search_facts(self._place, self._profile)
        except ValueError as e:
            self._say(done, f"no plan for the samples of late: {e}")
            return
        self._say(done, f"samples changed by {self._changed:.0%}; searching for another plan")
        self._search = PlanSearch(Question(self._profile, self._plan, facts))

    def _weigh(self, done: int, better: BetterPlan, step_s: Sequence[float]) -> NewPlan | None:
        """What to change to, if the steps that are left save more than the change costs."""
        changed = f"samples had changed by {self._changed:.0%}"
        if better.plan is None:
            self._say(done, f"{changed}; {better.why}")
            return None
        left = self._place.config.train.steps - done
        saved_s = better.share * float(np.median(step_s)) * left
        pays = better.share > _LEAST_GAIN and saved_s > self._start_s
        self._say(
            done,
            f"{changed}; another plan would save {better.share:.0%} of a step, {saved_s:.1f} s in "
            f"{left} steps, and cost {self._start_s:.1f} s: "
            + ("changing to it" if pays else "going on"),
        )
        return NewPlan(better.plan, self._profile) if pays else None

    def _say(self, done: int, what: str) -> None:
        self._progress.log(f"after step {done}: {what}")
