"""What a bucket costs, and how long a pipeline of buckets takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

_FORWARD_SHARE = 1 / 3  # of forward and backward


@dataclass(frozen=True)
class BucketCosts:
    """Seconds of one microbatch of each bucket: `seconds[bucket][station]`.

    A station is a module, or several that share devices and run one after the other; the LLM's is
    the last. Its seconds are those of its slowest pipeline stage, forward and backward, at the
    bucket's padded shape. `makespan_s`, if given,
    maps the buckets of a schedule's microbatches, in order, to seconds (a simulator); otherwise
    `pipeline_makespan` does.
    """

    seconds: tuple[tuple[float, ...], ...]
    makespan_s: Callable[[Sequence[int]], float] | None = None

    def __post_init__(self) -> None:
        if not self.seconds or len({len(row) for row in self.seconds}) != 1:
            raise ValueError("bucket costs need one row per bucket, one entry per station in each")
        if not all(0 <= s < float("inf") for row in self.seconds for s in row):
            raise ValueError(f"bucket costs must be finite and >= 0, got {self.seconds}")

    def predict_s(self, buckets: Sequence[int]) -> float:
        """Makespan of microbatches of these buckets, in this order."""
        if self.makespan_s is not None:
            return self.makespan_s(buckets)
        return pipeline_makespan([self.seconds[b] for b in buckets])


def pipeline_makespan(seconds: Sequence[Sequence[float]]) -> float:
    """Steady pipeline: each microbatch takes its slowest station's time; the first one also fills
    the pipeline, which adds its other stations' times. 0 for no microbatches."""
    if not seconds:
        return 0.0
    return sum(map(max, seconds)) + sum(seconds[0]) - max(seconds[0])


def overlapped_makespan(seconds: Sequence[Sequence[float]]) -> float:
    """1F1B of encoder and LLM with at most two microbatches in flight, simulated: also sees what
    `pipeline_makespan` does not, that neighbours of unlike size leave bubbles and a large last
    microbatch drains slowly. Encoders count as one (the slowest), a backward as two forwards."""
    encoder_M = [max(s[:-1], default=0.0) for s in seconds]
    with_tiles = [i for i, e in enumerate(encoder_M) if e > 0]
    made_M = [0.0] * len(seconds)  # when each microbatch's features are there
    encoder_free = llm_free = 0.0

    def forward(nth: int) -> None:
        nonlocal encoder_free
        if nth < len(with_tiles):
            i = with_tiles[nth]
            encoder_free += _FORWARD_SHARE * encoder_M[i]
            made_M[i] = encoder_free

    forward(0)
    forward(1)
    nth = 0
    for i, row in enumerate(seconds):
        llm_free = max(llm_free, made_M[i]) + row[-1]
        if encoder_M[i] > 0:  # its backward waits for the LLM's
            encoder_free = max(encoder_free, llm_free) + (1 - _FORWARD_SHARE) * encoder_M[i]
            nth += 1
            forward(nth + 1)
    return max(encoder_free, llm_free)
