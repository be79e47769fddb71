"""Decoding of samples in threads (for processes see `process_pool`), and replacement of samples
that cannot be decoded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from dflop_jax.data.sample import EMPTY_SAMPLE, MAX_CANDIDATES, Sample, Source, fits_in

logger = logging.getLogger("dflop_jax.data")


@dataclass(frozen=True)
class BadSample:
    """A sample that cannot be decoded."""

    reason: str  # one line that names the sample
    files: Mapping[str, str] = field(default_factory=dict)  # see `IndexRow`


DecodeResult = Sample | BadSample


def try_sample(source: Source, index: int) -> DecodeResult:
    """Return the decoded sample, or a `BadSample` if that fails."""
    try:
        return source.sample(index)
    except ValueError as e:
        return BadSample(f"{e}")


def check_load(source: Source, index: int, decoded: DecodeResult) -> DecodeResult:
    """Return the decoded sample, or a `BadSample` if its load is not the expected one."""
    expected_load = source.load(index)
    if isinstance(decoded, BadSample) or decoded.load == expected_load:
        return decoded
    label = source.label(index)
    return BadSample(f"{label}: decoded to {decoded.load}, but its header gives {expected_load}")


def decode(source: Source, index: int) -> DecodeResult:
    """Return the decoded sample, or a `BadSample` if decoding fails or its load differs."""
    return check_load(source, index, try_sample(source, index))


class ThreadDecoder:
    """Decodes samples of one source in `workers` threads; media libraries release the GIL."""

    def __init__(self, source: Source, workers: int) -> None:
        self._source = source
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="dflop-decode")

    def submit(self, index: int) -> Future[DecodeResult]:
        """Start to decode a sample; the future raises only errors of the program itself."""
        return self._pool.submit(self._decode, index)

    def close(self) -> None:
        """Cancel samples that have not started and wait for the others."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _decode(self, index: int) -> DecodeResult:
        return decode(self._source, index)


class Replacements:
    """Counts, logs and replaces samples that cannot be decoded. The replacement is the next sample
    that can be decoded and whose pieces are no larger, else an empty sample. It is the same in
    every process."""

    def __init__(self, source: Source, max_bad_fraction: float, global_batch: int) -> None:
        self._source, self._max_bad_fraction = source, max_bad_fraction
        self._global_batch = global_batch
        self._tried: set[int] = set()  # bad samples that this process tried
        # The step whose batch each bad sample of any process was decoded for.
        self._step_of_bad: dict[int, int] = {}

    def __len__(self) -> int:
        """Return the number of distinct bad samples so far, in all processes."""
        return len(self._step_of_bad)

    def __contains__(self, index: int) -> bool:
        """Return whether this process failed to decode the sample."""
        return index % len(self._source) in self._tried

    def bad_samples(self, steps: range) -> list[int]:
        """Return the bad samples in the batches of some steps."""
        return [index for index, step in [*self._step_of_bad.items()] if step in steps]

    def add_bad(self, step: int, indices: Iterable[int]) -> None:
        """Count bad samples that other processes, or this run before a resume, found for a step."""
        for index in indices:
            self._step_of_bad.setdefault(index, step)

    def usable_sample(
        self,
        step: int,
        index: int,
        decoded: DecodeResult | None,
        decode_again: Callable[[int], DecodeResult],
    ) -> Sample:
        """Return a sample of a step's batch, or a replacement that `decode_again` decodes. Pass
        None as `decoded` if the sample is known to be bad. ValueError: bad samples exceed the share
        `max_bad_fraction` of the samples drawn so far."""
        if decoded is not None and (sample := self._count_bad(step, index, decoded)) is not None:
            return sample
        n, limit = len(self._source), self._source.load(index)
        for candidate in ((index + k) % n for k in range(1, min(MAX_CANDIDATES, n))):
            if candidate in self or not fits_in(self._source.load(candidate), limit):
                continue
            if (sample := self._count_bad(step, candidate, decode_again(candidate))) is not None:
                return sample
        return EMPTY_SAMPLE

    def _count_bad(self, step: int, index: int, decoded: DecodeResult) -> Sample | None:
        """Return the sample, or None if it is bad. A bad sample is logged once."""
        if isinstance(decoded, Sample):
            return decoded
        source_index = index % len(self._source)  # the same in every epoch
        if source_index in self._tried:
            return None
        self._tried.add(source_index)
        self._step_of_bad.setdefault(source_index, step)
        logger.warning("replaced a sample that cannot be decoded: %s", decoded.reason)
        # The share of bad samples among a few means nothing.
        n_drawn = min(len(self._source), max(MAX_CANDIDATES, (step + 1) * self._global_batch))
        if (n_bad := len(self)) > self._max_bad_fraction * n_drawn:
            raise ValueError(
                f"{self._source.name}: {n_bad} of {n_drawn} samples cannot be decoded, the last is "
                f"{decoded.reason}; repair them or raise "
                f"data.max_bad_fraction={self._max_bad_fraction}"
            )
        return None
