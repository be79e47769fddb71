"""Compiles plans and times their own programs alone, all processes together."""

from __future__ import annotations

import dataclasses
import hashlib
from contextlib import suppress
from pathlib import Path

import msgspec

from dflop_jax.pipeline.calibration import Calibration, merged
from dflop_jax.pipeline.executor import Executor
from dflop_jax.pipeline.state import State
from dflop_jax.plan.pricing import plan_prices
from dflop_jax.record_files import load, save
from dflop_jax.records import ModelProfile, Plan, Predicted, PriceList, Prices
from dflop_jax.report.progress import Progress
from dflop_jax.train.optimizer import make_optimizer
from dflop_jax.train.prepare import Workplace

_FINALIST = "finalist"  # the key under which process 0 names plans to time, then the chosen one


def make_executor(place: Workplace, plan: Plan) -> Executor:
    """Return a plan's executor, nothing compiled yet.

    Raises:
      ValueError: the plan does not fit the model or the devices.
    """
    train, trained = place.config.train, place.trained
    return Executor(
        place.model,
        plan,
        make_optimizer(train),
        devices=place.devices,
        clip_norm=train.clip_norm,
        freeze=trained.frozen,
        rate_factors={g: rate / train.learning_rate for g, rate in trained.rates.items()},
        evaluates=train.eval_samples > 0,
    )


@dataclasses.dataclass(frozen=True)
class Timed:
    """An executor whose programs are compiled, and what every process saw when they ran alone
    (on process 0; empty on the others)."""

    executor: Executor
    n_programs: int
    parts: tuple[Calibration, ...]

    def prices(self, profile: ModelProfile) -> Prices:
        """Prices of the compiled programs, on process 0; what a group's content adds to them, and
        how many devices compute at once, are the profile's."""
        ex = self.executor
        own = merged(ex.plan, self.parts, one_at_a_time=ex.one_at_a_time)
        by_profile = plan_prices(ex.plan, profile)
        programs = {
            key: dataclasses.replace(price, pair_s=by_profile.programs.get(key, price).pair_s)
            for key, price in own.programs.items()
        }
        return dataclasses.replace(own, programs=programs, concurrency=by_profile.concurrency)


def compile_and_time(place: Workplace, ex: Executor) -> Timed:
    """Compile an executor's programs and time each alone; its state must be there (`init`)."""
    peers = place.peers
    n = ex.compile(sync=lambda: peers.barrier("compiled"))
    mine = ex.calibrate(sync=lambda: peers.barrier("calibrate"))
    parts = peers.gather("calibrated", mine.encode())
    return Timed(ex, n, tuple(Calibration.decode(part) for part in parts))


class Finalists:
    """Times the programs of plans, for the choice between them and for the scheduler.

    Process 0 searches and calls `prices`, then `choose`; the others are in `follow` meanwhile,
    which times the same plans with it. What was timed is kept in the cache folder, so that the same
    run comes to the same plan and the same schedules again, and compiles no other plan.
    """

    def __init__(self, place: Workplace, profile: ModelProfile, progress: Progress):
        self._place, self._profile, self._progress = place, profile, progress
        self._timed: dict[str, Timed] = {}

    def prices(self, plan: Plan) -> Prices:
        """Prices of a plan's own programs, or the profile's where no plan is to be timed; process 0
        only."""
        if not self._place.config.plan.finalists:
            return plan_prices(plan, self._profile)
        file = Path(self._place.config.cache_dir) / f"times-{self._name(plan)}.json"
        with suppress(ValueError):  # none yet, or one of another version
            return load(PriceList, file).prices
        meshes = ", ".join(f"{m.name} {m.stage}x{m.data}x{m.model}" for m in plan.submeshes)
        self._progress.log(f"timing the programs of {plan.policy}: {meshes}")
        self._place.peers.share(_FINALIST, msgspec.json.encode((plan, None)))
        prices = self._time(plan).prices(self._profile)
        file.parent.mkdir(parents=True, exist_ok=True)
        save(PriceList.of(prices), file)
        return prices

    def choose(self, plan: Plan, prices: Prices) -> None:
        """End `follow` on the other processes with the chosen plan and its prices; process 0
        only."""
        chosen = msgspec.json.encode((plan, PriceList.of(prices)))
        self._place.peers.share(_FINALIST, chosen)

    def follow(self) -> tuple[Plan, Prices]:
        """Time what process 0 times, until it has chosen; returns the chosen plan and its
        prices."""
        while True:
            data = self._place.peers.share(_FINALIST)
            plan, prices = msgspec.json.decode(data, type=tuple[Plan, PriceList | None])
            if prices:
                return plan, prices.prices
            self._time(plan)

    def take(self, plan: Plan) -> Timed | None:
        """The compiled executor of a plan, None if it was not timed here; the others are closed."""
        taken = self._timed.pop(self._name(plan), None)
        for timed in self._timed.values():
            timed.executor.close()
        self._timed.clear()
        if taken:
            taken.executor.plan = plan  # with what is predicted of it
        return taken

    def _time(self, plan: Plan) -> Timed:
        ex = make_executor(self._place, plan)
        ex.init(self._place.config.train.seed)
        timed = compile_and_time(self._place, ex)
        ex.state = State()  # the next plan needs the memory
        self._timed[self._name(plan)] = timed
        return timed

    def _name(self, plan: Plan) -> str:
        """What a plan's times depend on, as one word."""
        programs = dataclasses.replace(plan, predicted=Predicted(), work_budget=0, lookahead=0)
        trained = self._place.trained
        facts = (self._profile.key, programs, trained.frozen, sorted(trained.rates))
        return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:16]
