"""Loads batches in a fixed shuffled order, decoded and prepared in the background.

A step's samples depend only on (seed, step), see `shuffle`, so a run can resume at any step.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from dflop_jax.config import Config
from dflop_jax.data.content import content_counter
from dflop_jax.data.decoder import DecodeResult, Replacements, ThreadDecoder
from dflop_jax.data.process_pool import make_decoder
from dflop_jax.data.sample import Sample, Source, get_loads
from dflop_jax.data.shuffle import shuffled_indices
from dflop_jax.records import Load

if TYPE_CHECKING:  # processes that only decode do not load JAX
    from dflop_jax.contract import MultimodalModel

T = TypeVar("T")
DATA_FIELDS = ("n", "digest")  # keys of the loader's saved state that identify the data
FindOversize = Callable[[Sequence[Load]], Sequence[int]]  # indices of loads that fit no bucket
# (position in the batch, index, its decoding; None: it is known to be bad) of each sample.
PendingSamples = list[tuple[int, int, Future[DecodeResult] | None]]
logger = logging.getLogger("dflop_jax.data")


class OversizeFilter:
    """Replaces a sample that fits no compiled bucket by the next that fits, or raises an error."""

    def __init__(
        self, source: Source, find_oversize: FindOversize, *, refuse: bool = False
    ) -> None:
        self._source, self._find_oversize, self._refuse = source, find_oversize, refuse
        self._replacement_of: dict[int, int] = {}

    def replace_oversize(self, indices: Sequence[int]) -> list[int]:
        """Return the indices with oversize samples replaced. ValueError: they are refused."""
        unchecked = [i for i in dict.fromkeys(indices) if i not in self._replacement_of]
        for k in self._find_oversize(get_loads(self._source, unchecked)):
            self._replacement_of[unchecked[k]] = self._find_replacement(unchecked[k])
        return [self._replacement_of.get(i, i) for i in indices]

    def _find_replacement(self, index: int) -> int:
        n, label = len(self._source), self._source.label(index)
        message = f"{label} is larger than every compiled bucket"
        if self._refuse:
            raise ValueError(f"{message}; lower data.max_tokens or set data.oversize to drop")
        for candidate in ((index + k) % n for k in range(1, n)):
            if not self._find_oversize([self._source.load(candidate)]):
                replacement = self._source.label(candidate)
                logger.warning("left out: %s; replaced by %s", message, replacement)
                return candidate
        raise ValueError(f"{message}, and so are all others; make a plan for this data")


class Loader:
    """Loads batches of `global_batch` samples from a source; batches may span epochs.

    Args:
      workers: samples that are decoded at once; one more thread runs `prepare` of `batches`.
      prefetch: batches that are prepared ahead of the consumer.
      max_bad_fraction: upper limit of the share of distinct samples that cannot be decoded.
      decoder: returns a decoder, given the source and `workers`.
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
        decoder: Callable[[Source, int], ThreadDecoder] = ThreadDecoder,
        oversize_filter: OversizeFilter | None = None,
    ) -> None:
        if min(global_batch, workers, prefetch) < 1:
            raise ValueError("global_batch, workers and prefetch must be at least 1")
        self.source, self.global_batch, self.seed = source, global_batch, seed
        self._prefetch = prefetch
        self._make_decoder = partial(decoder, source, workers)
        self.replaced = Replacements(source, max_bad_fraction, global_batch)
        self._oversize_filter = oversize_filter
        self.add_content: Callable[[Load], Load] = lambda load: load  # adds content to a load
        self.indices = lru_cache(self._indices)  # called several times per step

    def _indices(self, step: int) -> list[int]:
        """Return the source indices of a step's batch, plus epoch x length if the source varies."""
        n = len(self.source)
        positions = np.arange(self.global_batch) + step * self.global_batch
        indices: list[int] = shuffled_indices(positions, n, self.seed).tolist()
        if self._oversize_filter:
            indices = self._oversize_filter.replace_oversize(indices)
        if not getattr(self.source, "varies", False):
            return indices
        return [i + k * n for i, k in zip(indices, (positions // n).tolist())]

    def loads(self, step: int) -> list[Load]:
        """Return the loads of a step's batch without decoding it."""
        return [self.add_content(load) for load in get_loads(self.source, self.indices(step))]

    def batches(
        self,
        steps: Iterable[int],
        prepare: Callable[[int, dict[int, Sample]], T],
        select: Callable[[int], Iterable[int]] | None = None,
        indices_of: Callable[[int], Sequence[int]] | None = None,
    ) -> Generator[T, None, None]:
        """Yield `prepare(step, samples)` for each step in order; the keys of `samples` are
        positions in the batch.

        `select`, decoding and `prepare` run in the background, `prefetch` batches ahead, each in
        the order of the steps. Their errors are raised here. Closing the generator ends them.
        `select` returns the positions to decode of a step's batch (None: all), `indices_of` the
        source indices of the batch (None: `indices`).
        """
        selector = ThreadPoolExecutor(1, thread_name_prefix="dflop-select")
        decoder = self._make_decoder()
        preparer = ThreadPoolExecutor(1, thread_name_prefix="dflop-prepare")
        batches: deque[Future[T]] = deque()

        def start_decoding(step: int) -> PendingSamples:
            indices = (indices_of or self.indices)(step)
            return [
                (k, i := indices[k], None if i in self.replaced else decoder.submit(i))
                for k in (range(len(indices)) if select is None else select(step))
            ]

        def finish_batch(step: int, pending: Future[PendingSamples]) -> T:
            def decode_again(index: int) -> DecodeResult:
                return decoder.submit(index).result()

            samples = {}
            for k, index, future in pending.result():
                decoded = None if future is None else future.result()
                samples[k] = self.replaced.usable_sample(step, index, decoded, decode_again)
            return prepare(step, samples)

        try:
            for step in steps:
                pending = selector.submit(start_decoding, step)
                batches.append(preparer.submit(finish_batch, step, pending))
                if len(batches) > self._prefetch:
                    yield batches.popleft().result()
            while batches:
                yield batches.popleft().result()
        finally:
            # in this order: each may wait for tasks that the one before it cancels
            selector.shutdown(wait=True, cancel_futures=True)
            decoder.close()
            preparer.shutdown(wait=True, cancel_futures=True)

    def state(self, step: int) -> dict[str, Any]:
        """Return the state that a checkpoint saves to resume at `step`."""
        order = {"seed": self.seed, "global_batch": self.global_batch, "n": len(self.source)}
        data = {"digest": getattr(self.source, "digest", ""), "name": self.source.name}
        return {"step": step, **order, **data, "bad": self.replaced.bad_samples(range(step))}

    def restore(self, state: dict[str, Any], changed: str = "refuse") -> int:
        """Return the step to resume at. ValueError: the order of samples has changed, or the data
        has and `changed` is not "ok"."""
        current = self.state(0)
        saved = {**current, **state}  # older checkpoints have no digest
        fields = ("seed", "global_batch", *DATA_FIELDS)
        changed_fields = [name for name in fields if saved[name] != current[name]]
        for name in changed_fields:
            if name in DATA_FIELDS and changed == "ok":
                continue
            remedy = "use the same data and settings"
            if name in DATA_FIELDS:
                remedy = f"restore the data of {saved['name']}, accept that of {current['name']} "
                remedy += "by --data.changed ok"
            raise ValueError(
                f"checkpoint was made with data {name}={saved[name]}, this run has "
                f"{current[name]}; {remedy}, or start a new run"
            )
        self.replaced.add_bad(saved["step"] - 1, () if changed_fields else saved["bad"])
        return int(saved["step"])


def make_loader(
    config: Config,
    source: Source,
    find_oversize: FindOversize | None = None,
    model: MultimodalModel | None = None,
) -> Loader:
    """Return the run's loader of a source; its loads have the content that `model` defines."""
    data = config.data
    limits: Any = {
        "timeout_s": data.sample_timeout_s,
        "memory_bytes": int(data.sample_memory_bytes),
    }
    oversize_filter = None
    if find_oversize:
        oversize_filter = OversizeFilter(source, find_oversize, refuse=data.oversize == "error")
    loader = Loader(
        source,
        global_batch=config.train.global_batch,
        seed=data.seed,
        workers=data.workers,
        prefetch=data.prefetch,
        max_bad_fraction=data.max_bad_fraction,
        decoder=partial(make_decoder, **limits),
        oversize_filter=oversize_filter,
    )
    if model:
        loader.add_content = content_counter(model)
    return loader
