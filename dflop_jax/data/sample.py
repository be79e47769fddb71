"""Decoded training samples, and the interface of data sources."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dflop_jax.records import Load

STREAMS = {"train": 0, "eval": 1}  # part of a split's random seed
MAX_CANDIDATES = 64  # upper limit of samples tried as the replacement of one


@dataclass(frozen=True, eq=False)
class FeatureGather:
    """Features of a source module that each token of a target module reads, for one sample."""

    # int32 [target tokens, K], indices of the sample's features in the source module; -1: none
    index: np.ndarray
    # float32 of the same shape: a token is a weighted sum of K features; None: a copy of one
    weight: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.index.ndim != 2 or (self.weight is None and self.index.shape[1] != 1):
            raise ValueError(f"gather indices of shape {self.index.shape} need weights, or K = 1")
        if self.weight is not None and self.weight.shape != self.index.shape:
            raise ValueError(f"weights {self.weight.shape} for indices {self.index.shape}")


@dataclass(frozen=True, eq=False)
class Sample:
    """A decoded sample: arrays by module and field name, and gathers between modules.

    `fields[module][name]` concatenates the sample's pieces in the module. Its first dimension is
    tokens or pieces. The keys of `gathers` are (source module, target module).
    """

    fields: Mapping[str, Mapping[str, np.ndarray]]
    gathers: Mapping[tuple[str, str], FeatureGather]
    load: Load

    def __post_init__(self) -> None:
        for module, named in self.fields.items():
            n_pieces, n_tokens = len(self.load.lengths(module)), self.load.tokens(module)
            for name, array in named.items():
                if len(array) not in (n_pieces, n_tokens):
                    raise ValueError(
                        f"field {name!r} of {module!r} has {len(array)} values for {n_pieces} "
                        f"pieces of {n_tokens} tokens"
                    )
        for (source, target), gather in self.gathers.items():
            if len(gather.index) != self.load.tokens(target):
                raise ValueError(
                    f"gather from {source!r} to {target!r}: {len(gather.index)} rows for "
                    f"{self.load.tokens(target)} tokens"
                )


EMPTY_SAMPLE = Sample({}, {}, Load({}))  # replaces a bad sample if no other sample can


def fits_in(load: Load, limit: Load) -> bool:
    """Return whether each module has at most the pieces of `limit` in a load, and none longer."""
    return all(
        len(lengths) <= len(limit.lengths(module))
        and all(n <= max_n for n, max_n in zip(lengths, limit.lengths(module)))
        for module, lengths in load.pieces.items()
    )


@dataclass(frozen=True)
class SourceFactory:
    """A function MODULE:NAME that opens the same source in another process, and its `arguments` as
    JSON types. The function must not import JAX."""

    function: str
    arguments: Mapping[str, Any]


class Source(Protocol):
    """A dataset with random access. `sample(i).load == load(i)` for every i.

    Optional attributes and methods:
      factory: a `SourceFactory`. Samples are then decoded in child processes instead of threads;
        set it if the source reads untrusted files.
      varies: True if `sample(i + k * n)` with n samples is sample i in epoch k, of the same load.
      dataset_of(index): returns the name of the sample's dataset in a mixture.
      digest: a hash of the records; a run resumes only if it is unchanged.
      largest_samples(): returns indices; each sample needs at most as much as one of these.
      loads(indices): returns many loads faster than `load` one by one.
    """

    @property
    def name(self) -> str: ...

    def __len__(self) -> int: ...

    def load(self, index: int) -> Load:
        """Return the sample's tokens in each module without decoding it."""
        ...

    def sample(self, index: int) -> Sample:
        """Return the decoded sample. ValueError names a sample that cannot be decoded."""
        ...

    def label(self, index: int) -> str:
        """Return the sample's name for logs and errors."""
        ...


def get_loads(source: Source, indices: Sequence[int]) -> list[Load]:
    """Return the loads of several samples."""
    load_many: Callable[[Sequence[int]], list[Load]] | None = getattr(source, "loads", None)
    return [source.load(i) for i in indices] if load_many is None else load_many(indices)
