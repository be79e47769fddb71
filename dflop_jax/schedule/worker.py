"""Schedules solved ahead of training, in another process.

The parent keeps `ahead` batches requested; one thread per worker passes a request to the child
and waits for its answer (no solving under the parent's GIL): see `children`.

A schedule depends on (loads, prices, step, work, seed) only, however late it comes and whoever
solves it: when the child is dead or out of grace the parent spends the same work on the same
request, so the answer is the child's bit for bit. Training then waits for it, as its
`schedule_wait_s` says.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType

import msgspec

from dflop_jax.children import Child
from dflop_jax.records import Load, Prices, Schedule, from_json, to_json
from dflop_jax.schedule.worker_main import (
    BatchRequest,
    PriceList,
    ScheduleReply,
    SolverSetup,
    answer,
)

_log = logging.getLogger(__name__)
# Deaths in a row without one schedule, after which the process is not started again; twice as many
# delay the message by as many starts.
_MAX_STILLBORN = 3


class ScheduleWorker:
    """`get(step)` returns the schedule of a global batch, solved ahead in a child process.

    Args:
      loads_of: step -> the loads of its global batch; called in the parent, in order.
      setup: the plan, what trains, and the work and integer program of a solve.
      prices: as for `schedule_batch`.
      changes: other prices by the first step that they hold for.
      first_step, stop_step: steps [first_step, stop_step) will be asked for; None: no end.
      ahead: batches requested ahead of the one asked for.
      grace_s: longest wait for a living child before the parent solves a batch itself; it then
        solves all until the child answers again.
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
        self._changed = threading.Condition()
        self._requests: dict[int, BatchRequest] = {}
        self._replies: dict[int, ScheduleReply] = {}
        self._question: BatchRequest | None = None  # what a correction gains
        self._gain_s: float | None = None  # the answer to it
        self._down = False  # the child died or was late, and none has answered since
        self._closed = False
        self._child: Child | None = None
        self.deaths = 0
        self.solved_here = 0  # batches that the parent solved in the child's place
        lists = {-1: prices, **(changes or {})}
        self._prices = {step: PriceList.of(p) for step, p in lists.items()}
        self._request_until(first_step + ahead)
        self._thread = threading.Thread(target=self._serve, name="schedule-worker", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """Process id of the living child."""
        return self._child.pid if self._child is not None else None

    def update_prices(self, prices: Prices) -> int:
        """Use these prices for the batches requested from now on (`ahead` steps from here), in
        place of all changes; returns the first step of these."""
        with self._changed:
            self._prices = {self._next_step: PriceList.of(prices)}
            return self._next_step

    def ask_gain(self, step: int, loads: Sequence[Load], prices: Prices, corrected: Prices) -> None:
        """Ask what `predicted_gain_s` is for this batch. It is computed where no schedule waits:
        for thousands of devices that takes seconds."""
        with self._changed:
            before, after = PriceList.of(prices), PriceList.of(corrected)
            self._question = BatchRequest(step, tuple(loads), before, after)
            self._gain_s = None
            self._changed.notify_all()

    @property
    def gain_s(self) -> float | None:
        """The answer to the last question; None before it came."""
        return self._gain_s

    def get(self, step: int) -> tuple[Schedule, float]:
        """(schedule of `step`, seconds waited for it: 0 when it was there). Steps are asked for in
        order.

        Raises:
          ValueError: the batch cannot be scheduled (a sample that fits no bucket).
        """
        self._request_until(step + 1 + self._ahead)
        start_s = time.perf_counter()
        with self._changed:
            assert step in self._requests, f"step {step} was asked for before, or is out of range"
            ready = step in self._replies
            self._changed.wait_for(lambda: step in self._replies or self._down, self._grace_s)
            request, reply = self._requests.pop(step), self._replies.pop(step, None)
            late = reply is None and not self._down
            self._down |= late
        if late:
            _log.warning(
                "step %d: no schedule from its worker in %g s; this process solves them until it "
                "answers, and training waits meanwhile",
                step,
                self._grace_s,
            )
        if reply is None:
            self.solved_here += 1
            assert request.prices is not None, "the parent keeps them with every request"
            reply = answer(self._setup, request, request.prices.prices)
        if reply.schedule is None:
            raise ValueError(f"step {step}: {reply.error}")
        return reply.schedule, 0.0 if ready else time.perf_counter() - start_s

    def close(self) -> None:
        """End the child; later calls do nothing."""
        with self._changed:
            self._closed = True
            child = self._child
            self._changed.notify_all()
        if child is not None:
            child.kill()
        self._thread.join()

    def __enter__(self) -> ScheduleWorker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _request_until(self, stop: int) -> None:
        stop = stop if self._stop_step is None else min(stop, self._stop_step)
        for step in range(self._next_step, stop):
            loads = tuple(self._loads_of(step))
            with self._changed:
                prices = self._prices[max(first for first in self._prices if first <= step)]
                request = BatchRequest(step, loads, prices)
                self._requests[step] = request
                self._next_step = step + 1
                self._changed.notify_all()

    def _serve(self) -> None:
        """Thread: keep a child alive and pass it the requests until the worker is closed."""
        stillborn = 0
        while stillborn < _MAX_STILLBORN:
            answered = self._run_child()
            with self._changed:
                if self._closed:
                    return
                self.deaths += 1
                self._down = True
                self._changed.notify_all()
            stillborn = 0 if answered else stillborn + 1
            _log.warning(
                "the schedule worker died (exit %s); %s, and training waits meanwhile",
                self._child.exit_code if self._child else None,
                "it is restarted, this process solves the next schedules"
                if stillborn < _MAX_STILLBORN
                else "it is not restarted, this process solves all schedules",
            )

    def _run_child(self) -> int:
        """Start a child and talk to it until it dies or the worker is closed; its answers."""
        child = Child(answer.__module__)
        with self._changed:
            self._child, closed = child, self._closed
        answered = 0 if closed else self._converse(child)
        child.kill()
        child.end()
        return answered

    def _converse(self, child: Child) -> int:
        """Pass requests, oldest first, until the child dies or the worker is closed; how many
        were answered."""
        answered, known = 0, None
        child.tell(to_json(self._setup))
        while (request := self._next_request()) is not None:
            if request.prices is known:  # most of the bytes of a request
                request = replace(request, prices=None)
            else:
                known = request.prices
            child.tell(to_json(request))
            if not (line := child.answer()):
                break
            try:
                reply = from_json(line, ScheduleReply)
            except msgspec.DecodeError as e:
                _log.warning("the schedule worker wrote %r, no schedule: %s", line[:80], e)
                break
            answered += 1
            with self._changed:
                self._down = False
                if request.corrected is not None:
                    if request is self._question:
                        self._question, self._gain_s = None, reply.gain_s
                elif reply.step in self._requests:  # not solved here in the meantime
                    self._replies[reply.step] = reply
                self._changed.notify_all()
        return answered

    def _next_request(self) -> BatchRequest | None:
        """The oldest request without a reply, a question after all others; waits for one. None
        when closed."""
        with self._changed:
            while not self._closed:
                waiting = self._requests.keys() - self._replies.keys()
                if waiting:
                    return self._requests[min(waiting)]
                if self._question:
                    return self._question
                self._changed.wait()
        return None
