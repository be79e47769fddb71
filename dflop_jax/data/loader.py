"""Batches in a fixed shuffled order, decoded and prepared ahead.

A step's samples follow from (seed, step) alone (see `shuffle`), so a run resumes at any step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any, TypeVar

import numpy as np

from dflop_jax.config import Config
from dflop_jax.data.decoder import Decoded, Decoder, Replacements, ThreadDecoder
from dflop_jax.data.pool.processes import make_decoder
from dflop_jax.data.sample import Sample, Source
from dflop_jax.data.shuffle import shuffled
from dflop_jax.records import Load

T = TypeVar("T")
Begun = list[tuple[int, int, Future[Decoded] | None]]  # (place in the batch, index, its decoding)


class Loader:
    """Batches of `global_batch` samples of a source; batches may span epochs.

    Args:
      workers: how many samples are decoded at once; one more thread runs `prepare` of `batches`.
      prefetch: batches kept under way ahead of the consumer.
      max_bad_fraction: share of undecodable samples, among the distinct ones seen, above which
        decoding raises ValueError.
      decoder: makes what decodes the source's samples, `workers` at once.
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
        decoder: Callable[[Source, int], Decoder] = ThreadDecoder,
    ) -> None:
        if min(global_batch, workers, prefetch) < 1:
            raise ValueError("global_batch, workers and prefetch must be at least 1")
        self.source, self.global_batch, self.seed = source, global_batch, seed
        self._prefetch = prefetch
        self._make_decoder = partial(decoder, source, workers)
        self._replaced = Replacements(source, max_bad_fraction)

    @property
    def bad(self) -> int:
        """Distinct samples found undecodable so far."""
        return len(self._replaced)

    def indices(self, step: int) -> list[int]:
        """Source indices of the batch of a step; of a source that varies with the epoch, each has
        its epoch times the source's length added."""
        places = np.arange(self.global_batch) + step * self.global_batch
        indices = shuffled(places, len(self.source), self.seed)
        if getattr(self.source, "varies", False):
            indices += places // len(self.source) * len(self.source)
        return indices.tolist()

    def loads(self, step: int) -> list[Load]:
        """Loads of the batch of a step; nothing is decoded."""
        return [self.source.load(i) for i in self.indices(step)]

    def samples(self, indices: Sequence[int]) -> list[Sample]:
        """Decoded samples. A replaced one may be smaller than its load, not larger."""
        with closing(self._make_decoder()) as decoder:
            begun = [decoder.submit(i) for i in indices]
            return [
                self._replaced.usable(i, decoded.result(), lambda k: decoder.submit(k).result())
                for i, decoded in zip(indices, begun, strict=True)
            ]

    def batches(
        self,
        steps: Iterable[int],
        prepare: Callable[[int, dict[int, Sample]], T],
        select: Callable[[int], Iterable[int]] | None = None,
    ) -> Generator[T, None, None]:
        """Yield `prepare(step, samples)` of each of the steps, in order.

        `samples` are by their place in the batch; `select(step)` says which places are wanted
        (all, unless given). `select`, decoding and `prepare` run in the background, `prefetch`
        batches ahead, each in the order of the steps. Their errors are raised here. Closing the
        generator (or leaving `contextlib.closing`) ends them.
        """
        selector = ThreadPoolExecutor(1, thread_name_prefix="dflop-select")
        decoder = self._make_decoder()
        preparer = ThreadPoolExecutor(1, thread_name_prefix="dflop-prepare")
        ahead: deque[Future[T]] = deque()

        def begin(step: int) -> Begun:
            indices = self.indices(step)
            places = range(len(indices)) if select is None else select(step)
            return [
                (k, indices[k], None if indices[k] in self._replaced else
                 decoder.submit(indices[k]))
                for k in places
            ]  # fmt: skip

        def finish(step: int, begun: Future[Begun]) -> T:
            samples = {
                k: self._replaced.usable(
                    index,
                    None if decoded is None else decoded.result(),
                    lambda other: decoder.submit(other).result(),
                )
                for k, index, decoded in begun.result()
            }
            return prepare(step, samples)

        try:
            for step in steps:
                ahead.append(preparer.submit(finish, step, selector.submit(begin, step)))
                if len(ahead) > self._prefetch:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            # in this order: each may be waiting for what the one before it cancels
            selector.shutdown(wait=True, cancel_futures=True)
            decoder.close()
            preparer.shutdown(wait=True, cancel_futures=True)

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint keeps to continue at `step`."""
        return {"step": step, **self._identity()}

    def restore(self, state: dict[str, Any]) -> int:
        """Return the step to continue at; ValueError when the data or their order are others."""
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise ValueError(
                    f"checkpoint was made with data {name}={state.get(name)}, this run has "
                    f"{value}; use the same data and settings, or start a new run"
                )
        return int(state["step"])

    def _identity(self) -> dict[str, int]:
        return {"seed": self.seed, "n": len(self.source), "global_batch": self.global_batch}


def make_loader(config: Config, source: Source) -> Loader:
    """Return the run's batches of a source."""
    return Loader(
        source,
        global_batch=config.train.global_batch,
        seed=config.data.seed,
        workers=config.data.workers,
        prefetch=config.data.prefetch,
        max_bad_fraction=config.data.max_bad_fraction,
        decoder=partial(
            make_decoder,
            timeout_s=config.data.sample_timeout_s,
            memory_bytes=int(config.data.sample_memory_bytes),
        ),
    )
