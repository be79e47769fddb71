"""How far a process's clock is from process 0's, measured over the key-value store.

Clocks of two hosts differ by some 20 ppm more each second, which is 1.7 s a day, so a process
measures again every `CLOCK_S`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

ROUND_TRIPS = 8  # per measurement; the shortest counts, since most wait for a thread
CLOCK_S = 60.0  # between two measurements, in which clocks of two hosts come 1.2 ms apart
ANSWER_S = 5.0  # longest wait for an answer
_CLOCK = "dflop/clock"


class ClockOffset:
    """Measures a clock against process 0's.

    Args:
      client: jax's client of the coordination service.
      read: waits for the value of a key, so many seconds at most.
      clock: of this process, in seconds.

    Attributes:
      seconds: what to add to this process's clock to get process 0's.
    """

    def __init__(
        self, client: Any, read: Callable[[str, float], bytes], clock: Callable[[], float]
    ):
        self.seconds = 0.0
        self._client, self._read, self._clock = client, read, clock
        self._measured_s = float("-inf")

    def measure_when_due(self) -> None:
        """Take the offset from the shortest of some round trips, the way there taken for as long as
        the way back: the error is at most half of the trip."""
        if time.monotonic() - self._measured_s < CLOCK_S:
            return
        trips: list[tuple[float, float]] = []
        for _ in range(ROUND_TRIPS):
            name = f"{_CLOCK}/{self._client.key_value_increment(f'{_CLOCK}s', 1)}"
            sent_s = self._clock()
            self._client.key_value_set_bytes(name, b"")
            times = self._read(f"{name}/answer", ANSWER_S)
            back_s = self._clock()
            self._client.key_value_delete(name)
            received_s, answered_s = msgspec.msgpack.decode(times, type=tuple[float, float])
            trip_s = (back_s - sent_s) - (answered_s - received_s)
            trips.append((trip_s, (received_s - sent_s + answered_s - back_s) / 2))
        self.seconds = min(trips)[1]
        self._measured_s = time.monotonic()

    def answer(self, question: int) -> None:
        """On process 0: wait for a question of any process, by its number, and say what time it
        is."""
        self._read(f"{_CLOCK}/{question}", float("inf"))
        times = msgspec.msgpack.encode((self._clock(), self._clock()))
        self._client.key_value_set_bytes(f"{_CLOCK}/{question}/answer", times)
