"""Compiles plans and times their programs, on all processes together."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import jax

from dflop_jax.distributed.messages import ProcessGroup
from dflop_jax.distributed.process_exit import RunFailed
from dflop_jax.hardware import GIB
from dflop_jax.plan.evaluate import fullest_schedule
from dflop_jax.plan.time_plans import MemoryShortage, PlanTooLarge
from dflop_jax.profile.cost_model import CostModel, layout_prices
from dflop_jax.records import (
    ModelProfile,
    Plan,
    Price,
    PriceList,
    Prices,
    Profile,
    ProgramId,
    Schedule,
    content_seconds,
)
from dflop_jax.records.files import digest, load_or_compute
from dflop_jax.report.progress import Progress
from dflop_jax.report.wall_time import COMPILE
from dflop_jax.runtime.calibration import Calibration, content_of_rows, merge_calibrations
from dflop_jax.runtime.executor import Executor
from dflop_jax.runtime.out_of_memory import is_out_of_memory, short_bytes
from dflop_jax.runtime.step import TrainState
from dflop_jax.schedule import count_program as counts_program
from dflop_jax.schedule.count_program import CountProgram, canonicalize, program_sizes
from dflop_jax.train.optimizer import make_optimizer
from dflop_jax.train.run_context import RunContext, count_compiles

REPEATS = 5  # timed runs of a program, whose median counts
T = TypeVar("T")
Sync = Callable[[], None]
_REQUEST = "timing"  # message key by which process 0 sends plans to try, then the chosen one
_MEMORY = "memory"  # message key of what each process lacks


def describe_plan(plan: Plan) -> str:
    meshes = ", ".join(f"{m.name} {m.text}" for m in plan.layout.submeshes)
    buckets = ", ".join(b.name for b in plan.layout.buckets)
    unrolled = ", ".join(s.name for s in plan.layout.segments if s.unrolled)
    text = f"; layers unrolled in {unrolled}, as the run is long" if unrolled else ""
    return f"{plan.policy}: {meshes}; buckets {buckets}{text}"


def run_with_memory_check(
    peers: ProcessGroup,
    plan: Plan,
    action: str,
    work: Callable[[Sync], T],
    limit_s: float | None = None,
) -> T:
    """Return the result of `work`, which all processes run together; it calls its argument where
    they wait for each other. If one runs out of memory, all raise PlanTooLarge.

    Args:
      limit_s: how long to wait for the others after this process ran out of memory; then it raises
        MemoryShortage, since they may wait on their devices for its data. None: `work` sends
        nothing.
    """

    def agree(own_shortage: tuple[str, float] | None = None) -> None:
        record_type = tuple[str, float] | None
        shortages = filter(None, peers.all_gather(_MEMORY, own_shortage, record_type))
        if worst := max(shortages, key=lambda s: s[1], default=None):
            raise PlanTooLarge(*worst)

    shortage = None
    try:
        result = work(agree)
    except RuntimeError as e:
        shortage = _find_shortage(peers, plan, action, e)
        if shortage is None:
            raise
    # The error is freed by now, and the arrays in its traceback with it.
    if shortage:
        wait_s = limit_s or threading.TIMEOUT_MAX
        timer = threading.Timer(wait_s, peers.cancel_waits, (_MEMORY,))
        timer.daemon = True
        timer.start()
        try:
            agree(shortage)
        except RunFailed:  # the others did not arrive
            raise MemoryShortage(*shortage) from None
        finally:
            timer.cancel()
    agree()
    return result


@contextmanager
def translate_memory_errors(peers: ProcessGroup, plan: Plan, action: str) -> Iterator[None]:
    """Raise MemoryShortage instead of XLA's error if this process runs out of memory; PlanTooLarge
    if it is the only one."""
    try:
        yield
    except RuntimeError as e:
        if shortage := _find_shortage(peers, plan, action, e):
            error_type = PlanTooLarge if peers.n_processes == 1 else MemoryShortage
            raise error_type(*shortage) from None
        raise


def _find_shortage(
    peers: ProcessGroup, plan: Plan, action: str, error: RuntimeError
) -> tuple[str, float] | None:
    """Return the arguments of `PlanTooLarge` if this process has run out of memory."""
    if not is_out_of_memory(error):
        return None
    n_bytes = short_bytes(error, jax.local_devices())
    text = f"does not fit into memory, process {peers.process_index} ran out of it {action}"
    short_by = f", {n_bytes / GIB:.2f} GiB short" if n_bytes else ""
    return f"plan {describe_plan(plan)}: {text}{short_by}", n_bytes


def make_executor(context: RunContext, plan: Plan) -> Executor:
    """Return a plan's executor; ValueError if it does not fit the model or the devices."""
    train, trained = context.config.train, context.trained
    return Executor(
        context.model,
        plan,
        make_optimizer(train),
        devices=context.devices,
        clip_norm=train.clip_norm,
        freeze=trained.frozen,
        rate_factors={g: rate / train.learning_rate for g, rate in trained.rates.items()},
        evaluates=train.evaluates,
    )


@dataclasses.dataclass(frozen=True)
class TimedPlan:
    """An executor whose programs are compiled and timed."""

    executor: Executor
    n_programs: int  # of this process
    n_found: int  # number of these found in the cache
    calibrations: tuple[Calibration, ...]  # of all processes, on process 0; empty on others
    seconds: float  # of compiling and timing

    def prices(self, profile: ModelProfile) -> Prices:
        """Return prices of the compiled programs, on process 0. The profile provides the seconds of
        content (subtracted from the timed ones), the concurrency and untimed step ends."""
        ex, layout = self.executor, self.executor.plan.layout
        measured = merge_calibrations(
            layout,
            self.calibrations,
            one_at_a_time=ex.one_at_a_time,
            shares_cores=profile.shares_cores,
        )
        by_profile = layout_prices(layout, CostModel(profile))

        def with_content(key: ProgramId, timed: Price) -> Price:
            unit_s = by_profile.programs.get(key, timed).content_s
            module = ex.model.modules[layout.segment(key.segment).module]
            content = [layout.group_size * n for n in content_of_rows(module, key.shape).values()]
            return Price(max(timed.static_s - content_seconds(unit_s, content), 0.0), unit_s)

        programs = {key: with_content(key, price) for key, price in measured.programs.items()}
        return dataclasses.replace(
            measured,
            programs=programs,
            step_end={**by_profile.step_end, **measured.step_end},
            concurrency=by_profile.concurrency,
        )


def compile_and_time(
    context: RunContext, ex: Executor, *, time_step_ends: bool = False, repeats: int = REPEATS
) -> TimedPlan:
    """Compile and time the programs of an executor that has a state (`init`); timing step ends
    changes that state. All processes raise PlanTooLarge if one runs out of memory."""
    peers, limit_s = context.peers, context.config.distributed.peer_timeout_s
    start_s = time.perf_counter()

    def compile_all(sync: Sync) -> int:
        return ex.compile(lambda *_: context.sections.renew(), sync)

    def calibrate(sync: Sync) -> Calibration:
        return ex.calibrate(repeats=repeats, sync=sync, ends=time_step_ends)

    with context.time_log.track(COMPILE), count_compiles() as counts:
        n = run_with_memory_check(peers, ex.plan, "compiling its programs", compile_all)
        n_found = counts.cache_hits
    calibration = run_with_memory_check(peers, ex.plan, "timing its programs", calibrate, limit_s)
    gathered = peers.gather("calibrated", calibration, Calibration)
    return TimedPlan(ex, n, n_found, tuple(gathered), time.perf_counter() - start_s)


def load_count_program(plan: Plan, cache_dir: str) -> CountProgram | None:
    """Return the integer program of a plan's batches, from the cache folder if possible: importing
    cvxpy takes more than a second and 73 MB. None if the plan's groups are not balanced."""
    if plan.scheduling.grouping != "balanced":
        return None
    sizes = program_sizes(plan.layout)
    code = hashlib.sha256(Path(counts_program.__file__).read_bytes()).hexdigest()
    facts = f"{sizes} {version('cvxpy')} {code}"
    file = Path(cache_dir, f"counts-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.json")
    return load_or_compute(CountProgram, file, lambda: canonicalize(sizes))


@dataclasses.dataclass(frozen=True)
class TimingRequest:
    """A request of process 0 to all processes: time a plan's programs."""

    plan: Plan
    schedule: Schedule | None = None  # a step to run, too
    prices: PriceList | None = None  # set if the plan is chosen
    refusal: str = ""  # why the plan is too large, if no other plan is tried


class PlanTimer:
    """Times the programs of plans, and runs a whole step of plans that may be chosen.

    Process 0 searches and calls `prices` and `try_step`, then `choose`; the other processes run
    `serve_requests` meanwhile. Times are stored in the cache folder, so that an equal run chooses
    the same plan and schedules again, and compiles no other plan.
    """

    def __init__(
        self,
        context: RunContext,
        profile: Profile,
        progress: Progress,
        running: Executor | None = None,
    ):
        self._context, self._profile, self._progress = context, profile, progress
        # Executor with the run's state; memory may have no room for another state.
        self._running = running
        self._executors: dict[str, Executor] = {}
        self._timed_plans: dict[str, TimedPlan] = {}

    def prices(self, plan: Plan) -> Prices:
        """Return prices of a plan's own programs, on process 0 only. PlanTooLarge if a process runs
        out of memory."""

        def time_programs() -> PriceList:
            self._progress.log(f"timing the programs of {describe_plan(plan)}")
            timed = self._run_on_all(TimingRequest(plan))
            return PriceList.from_prices(timed.prices(self._profile.model))

        file = Path(self._context.config.cache_dir, f"times-{self._plan_key(plan)}.json")
        return load_or_compute(PriceList, file, time_programs).prices

    def try_step(self, plan: Plan, prices: Prices) -> None:
        """Run one step of a plan if memory is limited; raises as `prices` does."""
        if self._context.plannable_bytes:
            loads, n = self._profile.data.loads, self._context.config.train.global_batch
            trainable = self._executor(plan).trainable
            schedule = fullest_schedule(plan, loads, n, prices, trainable)
            self._run_on_all(TimingRequest(plan, schedule))

    def choose(self, plan: Plan, prices: Prices) -> None:
        """End `serve_requests` on the other processes; on process 0 only."""
        request = TimingRequest(plan, prices=PriceList.from_prices(prices))
        self._context.peers.broadcast(_REQUEST, request, TimingRequest)

    def time_given(self, plan: Plan) -> Prices:
        """Return prices of the only plan to try, after a step of it; on process 0 only. All
        processes raise PlanTooLarge if one runs out of memory."""
        try:
            prices = self.prices(plan)
            self.try_step(plan, prices)
        except PlanTooLarge as e:
            request = TimingRequest(plan, refusal=e.reason)
            self._context.peers.broadcast(_REQUEST, request, TimingRequest)
            raise
        return prices

    def serve_requests(self) -> tuple[Plan, Prices]:
        """Run process 0's requests until it has chosen a plan; return the plan with its prices."""
        while True:
            request = self._context.peers.broadcast(_REQUEST, None, TimingRequest)
            if request.refusal:
                raise PlanTooLarge(request.refusal)
            if request.prices:
                return request.plan, request.prices.prices
            with suppress(PlanTooLarge):  # process 0 raises it, too
                self._run_request(request)

    def take_timed_plan(self, plan: Plan) -> TimedPlan | None:
        """Return the compiled executor of a plan, or None if it was not tried; close the others."""
        timed = self._timed_plans.pop(self._plan_key(plan), None)
        if timed:
            timed.executor.replace_plan(plan)
            self._executors.pop(self._plan_key(plan), None)
        for other in self._executors.values():
            other.close()
        self._executors.clear()
        self._timed_plans.clear()
        return timed

    def _run_on_all(self, request: TimingRequest) -> TimedPlan:
        self._context.peers.broadcast(_REQUEST, request, TimingRequest)
        try:
            return self._run_request(request)
        except PlanTooLarge as e:
            self._progress.log(f"dropped: {e.reason}")
            raise

    def _run_request(self, request: TimingRequest) -> TimedPlan:
        """Time a plan and run its step, if there is one; close a plan that is too large."""
        plan, name = request.plan, self._plan_key(request.plan)
        ex, timed = self._executor(plan), self._timed_plans.pop(name, None)
        config, peers = self._context.config, self._context.peers
        seed, limit_s = config.train.seed, config.distributed.peer_timeout_s
        if ex is self._running:
            timed = self._timed_plans[name] = timed or compile_and_time(self._context, ex)
            if schedule := request.schedule:  # without updates, which would change the run's state
                step = partial(ex.rehearse, schedule, with_updates=False)
                run_with_memory_check(peers, plan, "in a step", step, limit_s)
            return timed
        fits = False
        try:
            run_with_memory_check(
                peers, plan, "placing its parameters", lambda s: ex.init(seed, sync=s)
            )
            timed = timed or compile_and_time(self._context, ex, time_step_ends=True)
            if schedule := request.schedule:
                step = partial(ex.rehearse, schedule)
                run_with_memory_check(peers, plan, "in a step", step, limit_s)
            fits = True
        finally:
            ex.state = TrainState()  # the next plan needs the memory
            if not fits:
                self._executors.pop(name).close()
                gc.collect()  # objects in reference cycles
        self._timed_plans[name] = timed
        return timed

    def _executor(self, plan: Plan) -> Executor:
        """Return the executor of a plan, updated to the plan's newest fields."""
        if self._running and self._running.plan.layout == plan.layout:
            return self._running
        name = self._plan_key(plan)
        if name not in self._executors:
            self._executors[name] = make_executor(self._context, plan)
        self._executors[name].replace_plan(plan)
        return self._executors[name]

    def _plan_key(self, plan: Plan) -> str:
        """Return a hash of everything that a plan's times depend on."""
        trained = self._context.trained
        train = self._context.config.train
        stepping = train.optimizer, train.moments_dtype
        facts = (
            self._profile.model.key,
            plan.layout,
            trained.frozen,
            sorted(trained.rates),
            stepping,
        )
        return digest(facts)
