"""Solves schedules ahead of training in a child process.

The parent keeps `ahead` batches requested. A thread passes each request to the child and waits for
its answer, so no solving runs under the parent's GIL; see `child_processes`. The child reads one
request per line from stdin and writes one answer per line. It imports neither JAX nor cvxpy.

A schedule depends only on (loads, prices, step, work, seed), not on who solves it or when. If the
child is dead or exceeds its grace time, the parent spends the same work on the same request, and
gets the same schedule bit for bit. Training then waits for it; `schedule_wait_s` says how long.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import msgspec

from dflop_jax.child_processes import Child, ignore_signals, open_child_pipes
from dflop_jax.records import Load, Plan, PriceList, Prices, Schedule, from_json, to_json
from dflop_jax.schedule.batch_scheduler import schedule_batch
from dflop_jax.schedule.correction import predicted_gain_s
from dflop_jax.schedule.count_program import CountProgram

_log = logging.getLogger(__name__)
# Consecutive deaths without a schedule after which the child is not restarted; twice as many delay
# the message by as many starts.
_MAX_FAILED_STARTS = 3


@dataclass(frozen=True)
class SolverSetup:
    """The first line to the child: what all requests share. `program` is the integer program of the
    plan, if its grouping is balanced."""

    plan: Plan
    trainable: tuple[str, ...]
    work: int | None = None
    program: CountProgram | None = None
    seed: int = 0


@dataclass(frozen=True)
class BatchRequest:
    """A global batch to schedule. `prices` is None if they are those of the request before.

    With `corrected` prices, the answer is the seconds that scheduling by them saves, instead of a
    schedule.
    """

    step: int
    loads: tuple[Load, ...]
    prices: PriceList | None = None
    corrected: PriceList | None = None


@dataclass(frozen=True)
class ScheduleReply:
    """A schedule or a gain in seconds, or the message of the ValueError that the batch raised."""

    schedule: Schedule | None = None
    gain_s: float = 0.0
    error: str = ""


def answer_request(setup: SolverSetup, request: BatchRequest, prices: Prices) -> ScheduleReply:
    """The reply to one request."""
    loads, plan, trainable = request.loads, setup.plan, setup.trainable
    try:
        if request.corrected is not None:
            new_prices = request.corrected.prices
            gain_s = predicted_gain_s(loads, plan, prices, new_prices, trainable)
            return ScheduleReply(gain_s=gain_s)
        schedule = schedule_batch(
            loads,
            plan,
            prices,
            trainable,
            step=request.step,
            program=setup.program,
            work=setup.work,
            seed=setup.seed,
        )
    except ValueError as e:
        return ScheduleReply(error=str(e))
    return ScheduleReply(schedule)


def main() -> None:
    """Run the child process."""
    ignore_signals()
    requests, output = open_child_pipes()
    setup = from_json(requests.readline(), SolverSetup)
    prices = Prices({})
    for request_line in requests:
        request = from_json(request_line, BatchRequest)
        prices = request.prices.prices if request.prices else prices
        output.write(to_json(answer_request(setup, request, prices)) + b"\n")
        output.flush()


class ScheduleWorker:
    """Schedules of global batches, solved ahead in a child process; `get(step)` returns one.

    Args:
      loads_of: maps a step to the loads of its global batch; called in the parent, in order.
      setup: the plan, the trainable segments, and the work and integer program of a solve.
      prices: as for `schedule_batch`.
      changes: other prices, by the first step that they hold for.
      first_step, stop_step: steps [first_step, stop_step) will be requested; None: no end.
      ahead: batches requested ahead of the current one.
      grace_s: longest wait for a living child. After it, the parent solves batches itself until the
        child answers again.
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
        self._loads_of, self._ahead, self._grace_s = loads_of, ahead, grace_s
        self._setup = setup
        self._next_step, self._stop_step = first_step, stop_step
        self._requests: dict[int, tuple[BatchRequest, Future[ScheduleReply]]] = {}
        self._gain_request: tuple[BatchRequest, Future[ScheduleReply]] | None = None
        self._is_down = False  # the child died or was late, and none has answered since
        self._lock = threading.Lock()  # of prices with the step they hold from, and of the child
        self._closed = False
        self._child: Child | None = None
        self._child_prices: PriceList | None = None  # the prices that the child has
        self._failed_starts = 0
        self.n_deaths = 0
        self.n_solved_in_parent = 0  # batches that the parent solved in the child's place
        lists = {-1: prices, **(changes or {})}
        self._prices = {step: PriceList.from_prices(p) for step, p in lists.items()}
        self._thread = ThreadPoolExecutor(1, "schedule-worker")
        self._request_until(first_step + ahead)

    @property
    def pid(self) -> int | None:
        """Process id of the child; None if it does not run."""
        return self._child.pid if self._child is not None else None

    def update_prices(self, prices: Prices) -> int:
        """Use these prices, instead of all changes, for batches requested from now on (`ahead`
        steps from here); returns the first such step."""
        with self._lock:
            self._prices = {self._next_step: PriceList.from_prices(prices)}
            return self._next_step

    def request_gain(
        self, step: int, loads: Sequence[Load], prices: Prices, new_prices: Prices
    ) -> None:
        """Request `predicted_gain_s` for this batch. It is computed after the schedules that were
        requested before: it takes seconds for thousands of devices."""
        price_list, corrected_list = (
            PriceList.from_prices(prices),
            PriceList.from_prices(new_prices),
        )
        request = BatchRequest(step, tuple(loads), price_list, corrected_list)
        self._gain_request = request, self._thread.submit(self._send_request, request)

    @property
    def gain_s(self) -> float | None:
        """The answer to the last `request_gain`, in seconds; None until it arrives."""
        if self._gain_request is None or not self._gain_request[1].done():
            return None
        request, future = self._gain_request
        if future.exception() is None:
            return future.result().gain_s
        self._gain_request = request, self._thread.submit(self._send_request, request)
        return None

    def get(self, step: int) -> tuple[Schedule, float]:
        """(schedule of `step`, seconds waited for it; 0 if it was ready). Steps must be requested
        in order.

        Raises:
          ValueError: the batch cannot be scheduled (a sample fits no bucket).
        """
        self._request_until(step + 1 + self._ahead)
        start_s = time.perf_counter()
        assert step in self._requests, f"step {step} was asked for before, or is out of range"
        request, future = self._requests.pop(step)
        was_ready = future.done()
        try:
            reply = future.result(0 if self._is_down else self._grace_s)
        except (TimeoutError, ChildProcessError) as e:
            if isinstance(e, TimeoutError) and not self._is_down:
                self._is_down = True
                _log.warning(
                    "step %d: no schedule from its worker in %g s; this process solves them until "
                    "it answers, and training waits meanwhile",
                    step,
                    self._grace_s,
                )
            future.cancel()
            self.n_solved_in_parent += 1
            assert request.prices is not None, "the parent keeps them with every request"
            reply, was_ready = answer_request(self._setup, request, request.prices.prices), False
        if reply.schedule is None:
            raise ValueError(f"step {step}: {reply.error}")
        return reply.schedule, 0.0 if was_ready else time.perf_counter() - start_s

    def close(self) -> None:
        """End the child. Later calls do nothing."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._closed = True
            if self._child is not None:
                self._child.kill()
        self._thread.shutdown()
        if self._child is not None:
            self._child.close()

    def __enter__(self) -> ScheduleWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _request_until(self, stop: int) -> None:
        stop = stop if self._stop_step is None else min(stop, self._stop_step)
        for step in range(self._next_step, stop):
            loads = tuple(self._loads_of(step))
            with self._lock:
                prices = self._prices[max(first for first in self._prices if first <= step)]
                request = BatchRequest(step, loads, prices)
                self._requests[step] = request, self._thread.submit(self._send_request, request)
                self._next_step = step + 1

    def _send_request(self, request: BatchRequest) -> ScheduleReply:
        """Thread: the child's reply; starts a child if there is none.

        Raises:
          ChildProcessError: the child died or wrote something else.
        """
        with self._lock:
            if self._closed or self._failed_starts >= _MAX_FAILED_STARTS:
                raise ChildProcessError
            if self._child is None:
                self._child, self._child_prices = Child(__name__), None
                self._child.send(to_json(self._setup))
            child = self._child
        has_prices = request.prices is self._child_prices  # they are most of the bytes of a request
        child.send(to_json(replace(request, prices=None) if has_prices else request))
        self._child_prices = request.prices
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
        """Thread: end a child that does not answer, and log a warning."""
        if self._closed:
            return
        child.kill()
        exit_code = child.close()
        with self._lock:
            self._child = None
        self.n_deaths += 1
        self._failed_starts += 1
        self._is_down = True
        _log.warning(
            "the schedule worker died (exit %s); %s, and training waits meanwhile",
            exit_code,
            "it is restarted, this process solves the next schedules"
            if self._failed_starts < _MAX_FAILED_STARTS
            else "it is not restarted, this process solves all schedules",
        )
