"""What happened in a step, or would."""

from __future__ import annotations

from dataclasses import dataclass

# Between submeshes: what a segment sends on, and the gradients that come back to it.
SEND, RETURN = "send", "return"


@dataclass(frozen=True)
class Event:
    """A task that ran (or was simulated) on a submesh, times in seconds from the step's start."""

    submesh: str
    segment: str
    group: int
    direction: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Trace:
    """What happened in one step, or what the simulator says would happen: the same record."""

    step: int
    source: str
    events: tuple[Event, ...]

    @property
    def makespan_s(self) -> float:
        return max((e.end_s for e in self.events), default=0.0)

    def busy_fraction(self) -> dict[str, float]:
        """Share of the makespan in which each submesh computes."""
        total = self.makespan_s
        busy: dict[str, float] = {}
        for e in self.events:
            busy[e.submesh] = busy.get(e.submesh, 0.0) + (e.end_s - e.start_s)
        return {name: (b / total if total > 0 else 0.0) for name, b in busy.items()}
