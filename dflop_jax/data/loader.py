"""Batches in a fixed shuffled order, decoded and prepared ahead in threads.

The order is Grain's: every sample once an epoch, shuffled anew each epoch, with random access, so
that a step's samples follow from (seed, step) alone and a run resumes at any step.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import grain

from dflop_jax.data.datasets.layout import empty_sample
from dflop_jax.data.sample import Sample, Source
from dflop_jax.records import ITEMS, SampleShape

T = TypeVar("T")
MAX_TRIES = 64  # samples looked at to replace one that cannot be decoded
MIN_SEEN = 64  # the share of bad samples is judged over at least so many (or the whole dataset)
logger = logging.getLogger("dflop_jax.data")


class Loader:
    """Batches of `global_batch` samples of a source; batches may span epochs.

    Args:
      workers: threads that decode; one more runs `prepare` of `batches`.
      prefetch: batches kept under way ahead of the consumer.
      max_bad_fraction: share of undecodable samples, among the distinct ones seen, above which
        decoding raises ValueError.
    """

    def __init__(
        self,
        source: Source,
        *,
        global_batch: int,
        seed: int = 0,
        workers: int = 2,
        prefetch: int = 2,
        max_bad_fraction: float = 0.1,
    ) -> None:
        if min(global_batch, workers, prefetch) < 1:
            raise ValueError("global_batch, workers and prefetch must be at least 1")
        self.source, self.global_batch, self.seed = source, global_batch, seed
        self._workers, self._prefetch = workers, prefetch
        self._max_bad_fraction = max_bad_fraction
        self._order = grain.MapDataset.range(len(source)).seed(seed).shuffle().repeat()
        self._lock = threading.Lock()
        self._seen: set[int] = set()
        self._bad: set[int] = set()

    @property
    def bad(self) -> int:
        """Distinct samples found undecodable so far."""
        return len(self._bad)

    def indices(self, step: int) -> list[int]:
        """Source indices of the batch of a step."""
        first = step * self.global_batch
        return [int(self._order[first + k]) for k in range(self.global_batch)]

    def shapes(self, step: int) -> list[SampleShape]:
        """Shapes of the batch of a step; nothing is decoded."""
        return [self.source.shape(i) for i in self.indices(step)]

    def samples(self, step: int) -> list[Sample]:
        """Decoded batch of a step. A replaced sample may be smaller than its shape, not larger."""
        return [self._sample(i) for i in self.indices(step)]

    def batches(
        self,
        steps: Iterable[int],
        prepare: Callable[[int, dict[int, Sample]], T],
        select: Callable[[int], Iterable[int]] | None = None,
    ) -> Generator[T, None, None]:
        """`prepare(step, samples)` of each of the steps, in order.

        `samples` are by their place in the batch; `select(step)` says which places are wanted
        (all, unless given). `select`, decoding and `prepare` run in threads, `prefetch` batches
        ahead, each in the order of the steps. Their errors are raised here. Closing the generator
        (or leaving `contextlib.closing`) ends the threads.
        """
        selector = ThreadPoolExecutor(1, thread_name_prefix="dflop-select")
        decoders = ThreadPoolExecutor(self._workers, thread_name_prefix="dflop-decode")
        preparer = ThreadPoolExecutor(1, thread_name_prefix="dflop-prepare")
        ahead: deque[Future[T]] = deque()

        def decode(step: int) -> dict[int, Future[Sample]]:
            indices = self.indices(step)
            places = range(len(indices)) if select is None else select(step)
            return {k: decoders.submit(self._sample, indices[k]) for k in places}

        def finish(step: int, parts: Future[dict[int, Future[Sample]]]) -> T:
            return prepare(step, {k: part.result() for k, part in parts.result().items()})

        try:
            for step in steps:
                ahead.append(preparer.submit(finish, step, selector.submit(decode, step)))
                if len(ahead) > self._prefetch:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            # in this order: each may be waiting for what the one before it cancels
            for pool in (selector, decoders, preparer):
                pool.shutdown(wait=True, cancel_futures=True)

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint keeps to continue at `step`."""
        return {"step": step, **self._identity()}

    def restore(self, state: dict[str, Any]) -> int:
        """The step to continue at; ValueError when the data or their order are others."""
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise ValueError(
                    f"checkpoint was made with data {name}={state.get(name)}, this run has "
                    f"{value}; use the same data and settings, or start a new run"
                )
        return int(state["step"])

    def _identity(self) -> dict[str, int]:
        return {"seed": self.seed, "n": len(self.source), "global_batch": self.global_batch}

    def _sample(self, index: int) -> Sample:
        """The sample, or the next decodable one that is no larger, or an empty one."""
        found = self._decode(index)
        if found is not None:
            return found
        limit, n = self.source.shape(index), len(self.source)
        for other in ((index + k) % n for k in range(1, min(MAX_TRIES, n))):
            shape = self.source.shape(other)
            if all(shape.load(m) <= limit.load(m) for m in (*ITEMS, "llm")):
                found = self._decode(other)
                if found is not None:
                    return found
        return empty_sample()

    def _decode(self, index: int) -> Sample | None:
        """None for a sample that cannot be decoded, which is counted and logged the first time."""
        if index in self._bad:
            return None
        try:
            sample = self.source.sample(index)
            if sample.shape != self.source.shape(index):
                raise ValueError(
                    f"{self.source.label(index)}: decoded to {sample.shape}, its header promised "
                    f"{self.source.shape(index)}"
                )
        except ValueError as e:
            self._count_bad(index, e)
            return None
        with self._lock:
            self._seen.add(index)
        return sample

    def _count_bad(self, index: int, error: ValueError) -> None:
        with self._lock:
            if index in self._bad:
                return
            self._seen.add(index)
            self._bad.add(index)
            bad, seen = len(self._bad), len(self._seen)
        logger.warning("replaced a sample that cannot be decoded: %s", error)
        if bad > self._max_bad_fraction * max(seen, min(len(self.source), MIN_SEEN)):
            raise ValueError(
                f"{self.source.name}: {bad} of {seen} samples cannot be decoded, the last is "
                f"{error}; repair them or raise data.max_bad_fraction={self._max_bad_fraction}"
            )
