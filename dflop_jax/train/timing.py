"""Compiles plans and times their own programs alone, all processes together."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from dflop_jax.pipeline.calibration import Calibration, merged
from dflop_jax.pipeline.executor import Executor
from dflop_jax.pipeline.step import State
from dflop_jax.records import Plan, Predicted, Price, Prices, ProgramId, SendId, Task
from dflop_jax.report.progress import Progress
from dflop_jax.train.optimizer import make_optimizer
from dflop_jax.train.prepare import Workplace

_FINALIST = "finalist"  # the key under which process 0 names plans to time, and then the chosen one


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

    def prices(self, concurrency: float) -> Prices:
        """Prices of the compiled programs, on process 0."""
        ex = self.executor
        prices = merged(ex.plan, self.parts, one_at_a_time=ex.one_at_a_time)
        return dataclasses.replace(prices, concurrency=concurrency)


def compile_and_time(place: Workplace, ex: Executor) -> Timed:
    """Compile an executor's programs and time each alone; its state must be there (`init`)."""
    peers = place.peers
    n = ex.compile(sync=lambda: peers.barrier("compiled"))
    mine = ex.calibrate(sync=lambda: peers.barrier("calibrate"))
    parts = peers.gather("calibrated", mine.encode())
    return Timed(ex, n, tuple(Calibration.decode(part) for part in parts))


class Finalists:
    """Times the programs of the plans that a search could not tell apart by the profile.

    Process 0 searches and calls `time`, then `choose`; the others are in `follow` meanwhile, which
    times the same plans with it. What was timed is kept in the cache folder, so that the same run
    comes to the same plan again and compiles no other.
    """

    def __init__(self, place: Workplace, profile_key: str, concurrency: float, progress: Progress):
        self._place, self._progress = place, progress
        self._key, self._concurrency = profile_key, concurrency
        self._timed: dict[str, Timed] = {}

    def time(self, plan: Plan) -> Prices:
        """Prices of a plan's own programs; process 0 only."""
        file = Path(self._place.config.cache_dir) / f"times-{self._name(plan)}.json"
        if (known := read_prices(file)) is not None:
            return dataclasses.replace(known, concurrency=self._concurrency)
        meshes = ", ".join(f"{m.name} {m.stage}x{m.data}x{m.model}" for m in plan.submeshes)
        self._progress.log(f"timing the programs of {plan.policy}: {meshes}")
        self._place.peers.share(_FINALIST, msgspec.json.encode((plan, False)))
        prices = self._time(plan).prices(self._concurrency)
        write_prices(file, prices)
        return prices

    def choose(self, plan: Plan) -> Plan:
        """End `follow` on the other processes with the chosen plan; process 0 only."""
        self._place.peers.share(_FINALIST, msgspec.json.encode((plan, True)))
        return plan

    def follow(self) -> Plan:
        """Time what process 0 times, until it has chosen; returns the chosen plan."""
        while True:
            data = self._place.peers.share(_FINALIST)
            plan, chosen = msgspec.json.decode(data, type=tuple[Plan, bool])
            if chosen:
                return plan
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
        facts = (self._key, programs, trained.frozen, sorted(trained.rates))
        return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class _PriceFile:
    """Prices as JSON holds them."""

    programs: Sequence[tuple[ProgramId, Price]]
    step_end: Sequence[tuple[Task, float]]
    sends: Sequence[tuple[SendId, float]]


def write_prices(file: Path, prices: Prices) -> None:
    """Keep prices (but for the concurrency) in a file, whose folder is made."""
    rows = _PriceFile(
        list(prices.programs.items()), list(prices.step_end.items()), list(prices.sends.items())
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_suffix(".tmp")
    fresh.write_bytes(msgspec.json.encode(rows))
    fresh.replace(file)


def read_prices(file: Path) -> Prices | None:
    """Prices of a file; None where there is none, or one of another version."""
    try:
        rows = msgspec.json.decode(file.read_bytes(), type=_PriceFile)
        return Prices(dict(rows.programs), dict(rows.step_end), dict(rows.sends))
    except (FileNotFoundError, ValueError):
        return None
