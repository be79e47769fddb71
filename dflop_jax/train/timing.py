"""Compiles plans and times their own programs alone, all processes together: whoever lacks memory
says so to all."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import jax
import msgspec

from dflop_jax.distributed.messages import ProcessGroup
from dflop_jax.distributed.process_exit import RunFailed
from dflop_jax.hardware import GIB
from dflop_jax.plan.pricing import fullest_schedule
from dflop_jax.plan.time_plans import PlanTooLarge
from dflop_jax.profile.cost_model import CostModel
from dflop_jax.profile.prices import layout_prices
from dflop_jax.records import (
    ModelProfile,
    Plan,
    Price,
    PriceList,
    Prices,
    Profile,
    ProgramId,
    Schedule,
    content_s,
)
from dflop_jax.records.files import load_or_make
from dflop_jax.report.progress import Progress
from dflop_jax.report.wall_time import COMPILE
from dflop_jax.runtime.calibration import Calibration, merge_calibrations
from dflop_jax.runtime.executor import Executor
from dflop_jax.runtime.out_of_memory import is_out_of_memory, short_bytes
from dflop_jax.runtime.step import TrainState
from dflop_jax.runtime.synthetic_batch import content_of_rows
from dflop_jax.schedule import count_program as counts_program
from dflop_jax.schedule.count_program import CountProgram, canonicalize, program_sizes
from dflop_jax.train.compile_cache import compiles_counted
from dflop_jax.train.optimizer import make_optimizer
from dflop_jax.train.prepare import Workplace

REPEATS = 5  # timed runs of a program: their median tells
T = TypeVar("T")
Sync = Callable[[], None]
_FINALIST = "finalist"  # the key under which process 0 names plans to try, then the chosen one


class Shortage(msgspec.Struct):
    """That a process ran out of memory, and by how many bytes; 0: not known."""

    process: int
    short_bytes: float


def plan_words(plan: Plan) -> str:
    """What tells a plan from others, in a line."""
    meshes = ", ".join(f"{m.name} {m.text}" for m in plan.layout.submeshes)
    return f"{plan.policy}: {meshes}; buckets {', '.join(b.name for b in plan.layout.buckets)}"


def in_agreement(
    peers: ProcessGroup,
    plan: Plan,
    what: str,
    work: Callable[[Sync], T],
    limit_s: float | None = None,
) -> T:
    """Return what `work` gives, which all processes do together; it calls its argument where they
    wait for each other, and there they learn whether one of them has run out of memory.

    Args:
      what: is done, for the message, such as "compiling".
      limit_s: longest wait for the others after this process has run out, after which the run
        ends: they may wait on their devices for what it did not send. None: nothing is sent.

    Raises:
      PlanTooLarge: on every process, memory of one of them did not hold it.
    """

    def agree(mine: Shortage | None = None) -> None:
        known = filter(None, peers.all_gather("memory", mine, Shortage | None))
        if short := max(known, key=lambda s: s.short_bytes, default=None):
            raise _too_large(plan, what, short)

    shortage = None
    try:
        done = work(agree)
    except RuntimeError as e:
        shortage = _shortage(peers, e)
        if shortage is None:
            raise
    # The error is gone by now, and with it the arrays that its traceback holds.
    if shortage:
        too_large = _too_large(plan, what, shortage)
        timer = threading.Timer(limit_s or threading.TIMEOUT_MAX, peers.fail, (str(too_large), 2))
        timer.daemon = True
        timer.start()
        try:
            agree(shortage)
        except RunFailed:  # the others did not come
            raise too_large from None
        finally:
            timer.cancel()
    agree()
    return done


@contextmanager
def said_in_a_line(peers: ProcessGroup, plan: Plan, what: str) -> Iterator[None]:
    """PlanTooLarge in place of XLA's error where this process runs out of memory; the others are
    not asked."""
    try:
        yield
    except RuntimeError as e:
        if shortage := _shortage(peers, e):
            raise _too_large(plan, what, shortage) from None
        raise


def _shortage(peers: ProcessGroup, error: RuntimeError) -> Shortage | None:
    if not is_out_of_memory(error):
        return None
    return Shortage(peers.process_index, short_bytes(error, jax.local_devices()))


def _too_large(plan: Plan, what: str, shortage: Shortage) -> PlanTooLarge:
    by = f", {shortage.short_bytes / GIB:.2f} GiB short" if shortage.short_bytes else ""
    return PlanTooLarge(
        f"plan {plan_words(plan)}: does not fit into memory, process {shortage.process} ran out of "
        f"it {what}{by}",
        shortage.short_bytes,
    )


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
        evaluates=train.evaluates,
    )


@dataclasses.dataclass(frozen=True)
class Timed:
    """An executor whose programs are compiled, and what every process saw when they ran alone
    (on process 0; empty on the others); how many programs this process has, and how many of them
    it found in the cache."""

    executor: Executor
    n_programs: int
    n_found: int
    parts: tuple[Calibration, ...]

    def prices(self, profile: ModelProfile) -> Prices:
        """Prices of the compiled programs, on process 0; what a group's content adds to them, how
        many devices compute at once, and step ends that were not timed, are the profile's. The
        rows that were timed had content, too, which the static seconds are to be without."""
        ex, layout = self.executor, self.executor.plan.layout
        measured = merge_calibrations(
            layout,
            self.parts,
            one_at_a_time=ex.one_at_a_time,
            shares_cores=profile.shares_cores,
        )
        by_profile = layout_prices(layout, CostModel(profile))

        def with_content(key: ProgramId, timed: Price) -> Price:
            unit_s = by_profile.programs.get(key, timed).content_s
            module = ex.model.modules[layout.segment(key.segment).module]
            content = [layout.group_size * n for n in content_of_rows(module, key.shape).values()]
            return Price(max(timed.static_s - content_s(unit_s, content), 0.0), unit_s)

        programs = {key: with_content(key, price) for key, price in measured.programs.items()}
        return dataclasses.replace(
            measured,
            programs=programs,
            step_end={**by_profile.step_end, **measured.step_end},
            concurrency=by_profile.concurrency,
        )


def compile_and_time(
    place: Workplace, ex: Executor, *, ends: bool = False, repeats: int = REPEATS
) -> Timed:
    """Compile an executor's programs, run each alone once and then time it; its state must be there
    (`init`). `ends`: those of the step's end, too, which leave another state.

    Raises:
      PlanTooLarge: on every process, memory of one of them did not hold it.
    """
    peers = place.peers
    limit_s = place.config.distributed.peer_timeout_s
    with place.time.part(COMPILE), compiles_counted() as counts:
        compiling = partial(in_agreement, peers, ex.plan, "compiling its programs")
        n = compiling(lambda sync: ex.compile(lambda *_: place.sections.renew(), sync))
        n_found = counts.found
    calibrating = partial(in_agreement, peers, ex.plan, "timing its programs", limit_s=limit_s)
    mine = calibrating(lambda sync: ex.calibrate(repeats=repeats, sync=sync, ends=ends))
    parts = peers.gather("calibrated", mine.encode(), bytes)
    return Timed(ex, n, n_found, tuple(Calibration.decode(part) for part in parts))


def count_program(plan: Plan, cache_dir: str) -> CountProgram | None:
    """The integer program of a plan's batches, from the cache folder where it is there: cvxpy takes
    more than a second and 73 MB to import. None where the plan's groups are not balanced."""
    if plan.scheduling.grouping != "balanced":
        return None
    sizes = program_sizes(plan.layout)
    code = hashlib.sha256(Path(counts_program.__file__).read_bytes()).hexdigest()
    facts = f"{sizes} {version('cvxpy')} {code}"
    file = Path(cache_dir, f"counts-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.json")
    return load_or_make(CountProgram, file, lambda: canonicalize(sizes))


@dataclasses.dataclass(frozen=True)
class TimingRequest:
    """What process 0 asks of all: to time a plan's programs, to run one step of it on this
    schedule, or, with its prices, to take it."""

    plan: Plan
    schedule: Schedule | None = None
    prices: PriceList | None = None


class PlanTrials:
    """Tries plans out, for the choice between them and for the scheduler: times their programs, and
    runs a whole step of one that may be taken.

    Process 0 searches and calls `prices` and `rehearse`, then `choose`; the others are in `follow`
    meanwhile, which does the same with it. What was timed is kept in the cache folder, so that the
    same run comes to the same plan and the same schedules again, and compiles no other plan.

    Args:
      memory_bytes: of a device, that plans fill; 0: not known, and no step is tried.
    """

    def __init__(
        self, place: Workplace, profile: Profile, progress: Progress, memory_bytes: float = 0.0
    ):
        self._place, self._profile, self._progress = place, profile, progress
        self._memory_bytes = memory_bytes
        self._executors: dict[str, Executor] = {}
        self._timed: dict[str, Timed] = {}

    def prices(self, plan: Plan) -> Prices:
        """Prices of a plan's own programs, or the profile's where no plan is to be timed; process 0
        only.

        Raises:
          PlanTooLarge: memory of a process did not hold it.
        """
        if not self._place.config.plan.finalists:
            return layout_prices(plan.layout, CostModel(self._profile.model))

        def time_programs() -> PriceList:
            self._progress.log(f"timing the programs of {plan_words(plan)}")
            return PriceList.of(self._all(TimingRequest(plan)).prices(self._profile.model))

        file = Path(self._place.config.cache_dir, f"times-{self._name(plan)}.json")
        return load_or_make(PriceList, file, time_programs).prices

    def rehearse(self, plan: Plan, prices: Prices) -> None:
        """Run one step of a plan, where devices have limited memory, so that all that a step holds
        at once meets before it is taken; process 0 only.

        Raises:
          PlanTooLarge: memory of a process did not hold it.
        """
        if self._memory_bytes:
            loads, n = self._profile.data.loads, self._place.config.train.global_batch
            trainable = self._executor(plan).trainable
            schedule = fullest_schedule(plan, loads, n, prices, trainable)
            self._all(TimingRequest(plan, schedule))

    def choose(self, plan: Plan, prices: Prices) -> None:
        """End `follow` on the other processes with the chosen plan and its prices; process 0
        only."""
        self._share(TimingRequest(plan, prices=PriceList.of(prices)))

    def follow(self) -> tuple[Plan, Prices]:
        """Do what process 0 asks, until it has chosen; returns the chosen plan and its prices."""
        while True:
            asked = self._place.peers.broadcast(_FINALIST, None, TimingRequest)
            if asked.prices:
                return asked.plan, asked.prices.prices
            with suppress(PlanTooLarge):  # process 0 knows it, too
                self._try(asked)

    def take(self, plan: Plan) -> Timed | None:
        """The compiled executor of a plan, None if it was not tried here; the others are closed."""
        taken = self._timed.pop(self._name(plan), None)
        if taken:
            taken.executor.replace_plan(plan)
            del self._executors[self._name(plan)]
        for other in self._executors.values():
            other.close()
        self._executors.clear()
        self._timed.clear()
        return taken

    def _share(self, asked: TimingRequest) -> None:
        self._place.peers.broadcast(_FINALIST, asked, TimingRequest)

    def _all(self, asked: TimingRequest) -> Timed:
        """What process 0 and the others do together."""
        self._share(asked)
        try:
            return self._try(asked)
        except PlanTooLarge as e:
            self._progress.log(f"dropped: {e.reason}")
            raise

    def _try(self, asked: TimingRequest) -> Timed:
        """The timed plan, one that has run a step where there is a schedule; its state is gone.
        One that memory does not hold is closed."""
        plan, name = asked.plan, self._name(asked.plan)
        ex, timed = self._executor(plan), self._timed.pop(name, None)
        config, peers = self._place.config, self._place.peers
        fits = False
        try:
            seed, limit_s = config.train.seed, config.distributed.peer_timeout_s
            in_agreement(peers, plan, "placing its parameters", lambda s: ex.init(seed, sync=s))
            timed = timed or compile_and_time(self._place, ex, ends=True)
            if schedule := asked.schedule:
                step = partial(ex.rehearse, schedule)
                in_agreement(peers, plan, "in a step", step, limit_s)
            fits = True
        finally:
            ex.state = TrainState()  # the next plan needs the memory
            if not fits:
                self._executors.pop(name).close()
                gc.collect()  # what only cycles hold
        self._timed[name] = timed
        return timed

    def _executor(self, plan: Plan) -> Executor:
        """The executor of a plan, with all that the plan says by now."""
        name = self._name(plan)
        if name not in self._executors:
            self._executors[name] = make_executor(self._place, plan)
        self._executors[name].replace_plan(plan)
        return self._executors[name]

    def _name(self, plan: Plan) -> str:
        """What a plan's times depend on, as one word."""
        trained = self._place.trained
        train = self._place.config.train
        stepping = train.optimizer, train.moments_dtype
        facts = (
            self._profile.model.key, plan.layout, trained.frozen, sorted(trained.rates), stepping
        )  # fmt: skip
        return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:16]
