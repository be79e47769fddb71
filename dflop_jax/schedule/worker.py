"""Solve schedules ahead of training in a child process.

The parent requests the schedules of `ahead` batches in advance. A thread passes each request to the
child and waits for its reply, so no solving runs under the parent's GIL; see `child_processes`. The
child imports neither JAX nor cvxpy.

A schedule depends only on (loads, prices, step, work), not on the process or the time. If the child
is dead or exceeds its grace time, the parent solves the same request with the same result. Training
then waits; `schedule_wait_s` has the seconds.

The child also simulates every 10th batch under baselines (`schedule.baselines`), less often if that
takes more than 1% of a core; the parent never does.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import msgspec

from dflop_jax.child_processes import Child, ignore_signals, open_child_pipes
from dflop_jax.records import Load, Plan, PriceList, Prices, Schedule, from_json, to_json
from dflop_jax.schedule.baselines import Baselines, simulate_baselines
from dflop_jax.schedule.batch_scheduler import schedule_batch
from dflop_jax.schedule.correction import predicted_gain_s
from dflop_jax.schedule.count_program import CountProgram

_log = logging.getLogger(__name__)
_MAX_FAILED_STARTS = 3  # consecutive deaths without a schedule after which no child is started
# Steps between batches that are simulated under baselines; they are further apart if that takes
# more than the share of a core.
BASELINE_INTERVAL, _BASELINE_SHARE = 10, 0.01


@dataclass(frozen=True)
class SolverSetup:
    """The first line to the child: arguments of all requests. `program` is the integer program of
    the plan, if its grouping is balanced. None for `baselines`: the run is compared with none."""

    plan: Plan
    trainable: tuple[str, ...]
    work: int | None = None
    program: CountProgram | None = None
    baselines: Baselines | None = None


@dataclass(frozen=True)
class BatchRequest:
    """A global batch to schedule. With `corrected` prices, the reply has instead the seconds that
    scheduling by these prices saves; with `for_baselines`, the seconds of its steps under these."""

    step: int
    loads: tuple[Load, ...]
    prices: PriceList
    corrected: PriceList | None = None
    for_baselines: bool = False


@dataclass(frozen=True)
class ScheduleReply:
    """A schedule, a gain, steps of baselines, or the message of the ValueError of the batch."""

    schedule: Schedule | None = None
    gain_s: float = 0.0
    baseline_s: dict[str, float] = field(default_factory=dict)  # step seconds by baseline
    cpu_s: float = 0.0  # that simulating the baselines took
    error: str = ""


def answer_request(setup: SolverSetup, request: BatchRequest) -> ScheduleReply:
    """Return the reply to one request."""
    loads, plan, trainable = request.loads, setup.plan, setup.trainable
    prices, corrected = request.prices.prices, request.corrected
    try:
        if corrected is not None:
            gain_s = predicted_gain_s(loads, plan, prices, corrected.prices, trainable)
            return ScheduleReply(gain_s=gain_s)
        if request.for_baselines and setup.baselines:
            start_s = time.process_time()
            steps_s = simulate_baselines(loads, plan, prices, trainable, setup.baselines)
            return ScheduleReply(baseline_s=steps_s, cpu_s=time.process_time() - start_s)
        step, work, program = request.step, setup.work, setup.program
        return ScheduleReply(
            schedule_batch(loads, plan, prices, trainable, step=step, program=program, work=work)
        )
    except ValueError as e:
        return ScheduleReply(error=str(e))


def main() -> None:
    """Run the child process: a request per line of stdin, a reply per line of stdout."""
    ignore_signals()
    requests, output = open_child_pipes()
    setup = from_json(requests.readline(), SolverSetup)
    for request_line in requests:
        request = from_json(request_line, BatchRequest)
        output.write(to_json(answer_request(setup, request)) + b"\n")
        output.flush()


class ScheduleWorker:
    """Schedules of global batches, solved ahead in a child process; `get(step)` returns one.

    Args:
      loads_of: maps a step to the loads of its global batch; called in the parent, in order.
      prices: as for `schedule_batch`.
      changes: other prices, by the first step that uses them.
      first_step, stop_step: steps [first_step, stop_step) will be requested; None: no end.
      ahead: number of batches requested in advance.
      grace_s: maximum seconds to wait for a live child. Then the parent solves batches itself until
        the child replies again.
    """

    def __init__(
        self,
        loads_of: Callable[[int], Sequence[Load]],
        setup: SolverSetup,
        prices: Prices,
        *,
        changes: Mapping[int, Prices] | None = None,
        first_step: int = 0,
        stop_step: int | None = None,
        ahead: int = 4,
        grace_s: float = 30.0,
    ):
        self._loads_of, self._ahead, self._grace_s, self._setup = loads_of, ahead, grace_s, setup
        self._next_step, self._stop_step = first_step, stop_step
        self._requests: dict[int, tuple[BatchRequest, Future[ScheduleReply]]] = {}
        self._gain_request: tuple[BatchRequest, Future[ScheduleReply]] | None = None
        # A step, and the reply with its steps under baselines; None: no step is being simulated.
        self._compared: tuple[int, Future[ScheduleReply]] | None = None
        self._next_compared = 0  # no earlier step is simulated under baselines
        self._is_down = False  # the child died or was late, and none has answered since
        self._lock = threading.Lock()  # of prices with the step they hold from, and of the child
        self._closed = False
        self._child: Child | None = None
        self._failed_starts = 0
        lists = {-1: prices, **(changes or {})}
        self._prices = {step: PriceList.from_prices(p) for step, p in lists.items()}
        self._thread = ThreadPoolExecutor(1, "schedule-worker")
        self._request_until(first_step + ahead)

    def update_prices(self, prices: Prices) -> int:
        """Use these prices for all batches not yet requested; return the first such step."""
        with self._lock:
            self._prices = {self._next_step: PriceList.from_prices(prices)}
            return self._next_step

    def request_gain(
        self, step: int, loads: Sequence[Load], prices: Prices, new_prices: Prices
    ) -> None:
        """Request `predicted_gain_s` for this batch; earlier requests are answered first."""
        old_list, new_list = map(PriceList.from_prices, (prices, new_prices))
        request = BatchRequest(step, tuple(loads), old_list, new_list)
        self._gain_request = request, self._thread.submit(self._send_request, request)

    @property
    def gain_s(self) -> float | None:
        """The reply to the last `request_gain`, in seconds; None until it arrives."""
        if self._gain_request is None or not self._gain_request[1].done():
            return None
        request, future = self._gain_request
        if future.exception() is None:
            return future.result().gain_s
        self._gain_request = request, self._thread.submit(self._send_request, request)
        return None

    def take_baselines(self, step: int, step_s: float) -> dict[str, float]:
        """Return the step seconds of baselines for this finished step's batch, by name; {} if they
        were not simulated. `step_s` is what the step took."""
        if self._compared is None:
            return {}
        compared_step, future = self._compared
        if step < compared_step or not future.done():
            return {}
        self._compared = None
        if future.exception() is not None:
            return {}
        reply = future.result()
        share = reply.cpu_s / (step_s * BASELINE_INTERVAL) if step_s > 0 else 0.0
        interval = BASELINE_INTERVAL * max(1, math.ceil(share / _BASELINE_SHARE))
        self._next_compared = compared_step + interval
        return reply.baseline_s if step == compared_step else {}

    def get(self, step: int) -> tuple[Schedule, float]:
        """Return (schedule of `step`, seconds waited); ValueError if a sample fits no bucket."""
        self._request_until(step + 1 + self._ahead)
        start_s = time.perf_counter()
        request, future = self._requests.pop(step)
        was_ready = future.done()
        try:
            reply = future.result(0 if self._is_down else self._grace_s)
        except (TimeoutError, ChildProcessError) as e:
            if isinstance(e, TimeoutError) and not self._is_down:
                self._is_down = True
                _log.warning(
                    "step %d: no schedule from the worker in %g s; the training process solves "
                    "schedules until the worker replies, and training waits for them",
                    step,
                    self._grace_s,
                )
            future.cancel()
            reply, was_ready = answer_request(self._setup, request), False
        if reply.schedule is None:
            raise ValueError(f"step {step}: {reply.error}")
        return reply.schedule, 0.0 if was_ready else time.perf_counter() - start_s

    def close(self) -> None:
        """Kill the child. Later calls do nothing."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._closed = True
            if self._child is not None:
                self._child.kill()
        self._thread.shutdown()
        if self._child is not None:
            self._child.close()

    def _request_until(self, stop: int) -> None:
        stop = stop if self._stop_step is None else min(stop, self._stop_step)
        for step in range(self._next_step, stop):
            loads = tuple(self._loads_of(step))
            with self._lock:
                prices = self._prices[max(first for first in self._prices if first <= step)]
                request = BatchRequest(step, loads, prices)
                self._requests[step] = request, self._thread.submit(self._send_request, request)
                self._next_step = step + 1
            is_due = (step + 1) % BASELINE_INTERVAL == 0 and step >= self._next_compared
            if self._setup.baselines and is_due and self._compared is None:
                for_baselines = replace(request, for_baselines=True)
                self._compared = step, self._thread.submit(self._send_request, for_baselines)

    def _send_request(self, request: BatchRequest) -> ScheduleReply:
        """Return the child's reply; start a child if there is none. Runs in the worker's thread.
        ChildProcessError: the child died."""
        with self._lock:
            if self._closed or self._failed_starts >= _MAX_FAILED_STARTS:
                raise ChildProcessError
            if self._child is None:
                self._child = Child(__name__)
                self._child.send(to_json(self._setup))
            child = self._child
        child.send(to_json(request))
        reply_line = child.receive()
        try:
            reply = from_json(reply_line, ScheduleReply)
        except msgspec.DecodeError as e:
            if reply_line:
                _log.warning("the schedule worker wrote %r, no schedule: %s", reply_line[:80], e)
            self._end_dead_child(child)
            raise ChildProcessError from None
        self._is_down, self._failed_starts = False, 0
        return reply

    def _end_dead_child(self, child: Child) -> None:
        """Kill a child that does not reply, and log a warning. Runs in the worker's thread."""
        if self._closed:
            return
        child.kill()
        exit_code = child.close()
        with self._lock:
            self._child = None
        self._failed_starts += 1
        self._is_down = True
        _log.warning(
            "the schedule worker died (exit code %s); %s, and training waits for them",
            exit_code,
            "it is restarted; until then the training process solves schedules"
            if self._failed_starts < _MAX_FAILED_STARTS
            else "it is not restarted; the training process solves all schedules",
        )
