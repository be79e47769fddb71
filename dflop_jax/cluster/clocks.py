"""What the clock of another process lacks to this one's, measured again with every sign of life.

Clocks of two hosts run apart by some 20 ppm, which is 1.7 s a day, so one comparison at the start
of a run is soon worth nothing.
"""

from __future__ import annotations

from collections import deque

# Of this many newest round trips the quickest counts: most of them wait somewhere for a thread or
# behind a longer message. With one a second, clocks 20 ppm apart differ by 0.16 ms over them.
ROUND_TRIPS = 8


class ClockOffset:
    """`seconds` is what to add to a peer's clock to get this process's; the error is at most half
    of a round trip, and what the clocks ran apart since."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._trips: deque[tuple[float, float]] = deque(maxlen=ROUND_TRIPS)

    def add(self, sent_s: float, received_s: float, answered_s: float, back_s: float) -> None:
        """Take in a round trip, the way there taken for as long as the way back.

        Args:
          sent_s, back_s: when the question left and the answer came, by this process's clock.
          received_s, answered_s: when the question came and the answer left, by the peer's.
        """
        trip_s = (back_s - sent_s) - (answered_s - received_s)
        offset_s = (sent_s - received_s + back_s - answered_s) / 2
        self._trips.appendleft((trip_s, offset_s))
        self.seconds = min(self._trips)[1]
