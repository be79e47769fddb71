"""One decoded training example, and what a data source offers to the rest of the program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dflop_jax.records import Load

STREAMS = {"train": 0, "eval": 1}  # what draws of a split begin with
MAX_CANDIDATES = 64  # samples looked at for one that can stand in the place of another


@dataclass(frozen=True, eq=False)
class FeatureGather:
    """Which features of a source module each token of a target module reads, for one sample."""

    # int32 [target tokens, K], numbers of features of the sample's pieces in the source; -1: none
    index: np.ndarray
    # float32 of the same shape, where a token is a weighted sum; None: a plain copy, K = 1
    weight: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.index.ndim != 2 or (self.weight is None and self.index.shape[1] != 1):
            raise ValueError(f"places of shape {self.index.shape} need weights, or K = 1")
        if self.weight is not None and self.weight.shape != self.index.shape:
            raise ValueError(f"weights {self.weight.shape} of places {self.index.shape}")


@dataclass(frozen=True, eq=False)
class Sample:
    """A decoded sample: plain arrays by module and name, and how modules are joined.

    `fields[module][name]` concatenates all pieces of the sample in the module: dim 0 counts tokens
    if every token has a value, else pieces. `gathers` are by (source module, target module).
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
                    f"places of {source!r} in {target!r}: {len(gather.index)} for "
                    f"{self.load.tokens(target)} tokens"
                )


EMPTY = Sample({}, {}, Load({}))  # stands for a sample that nothing can replace


def fits_in(load: Load, limit: Load) -> bool:
    """Return whether no module has more or longer pieces in a load than in `limit`."""
    return all(
        len(lengths) <= len(limit.lengths(module))
        and all(n <= max_n for n, max_n in zip(lengths, limit.lengths(module)))
        for module, lengths in load.pieces.items()
    )


@dataclass(frozen=True)
class SourceFactory:
    """How another process opens the same source: MODULE:FUNCTION is called with `arguments`, which
    are JSON. The function must not import JAX."""

    function: str
    arguments: Mapping[str, Any]


class Source(Protocol):
    """A dataset with random access. `sample(i).load == load(i)` for every i.

    Optional attributes and methods:
      factory: a `SourceFactory`; samples are then decoded in child processes, else in threads. Set
        it where files of other people are read.
      varies: True where `sample(i + k n)` of n samples is sample i in epoch k, of the same load.
      dataset_of(index): the name of the dataset of a mixture that a sample is from.
      digest: of the records; a resumed run refuses other data by it.
      largest_samples(): indices of samples of which one asks for as much of every module as any.
      loads(indices): many loads at once, for less work than one by one.
    """

    @property
    def name(self) -> str: ...

    def __len__(self) -> int: ...

    def load(self, index: int) -> Load:
        """Return the tokens that the sample needs of every module; nothing is decoded."""
        ...

    def sample(self, index: int) -> Sample:
        """Return the decoded sample; ValueError, which names it: it cannot be decoded."""
        ...

    def label(self, index: int) -> str:
        """Return the name of the sample in logs and errors."""
        ...


def get_loads(source: Source, indices: Sequence[int]) -> list[Load]:
    """Return the loads of some samples."""
    load_many: Callable[[Sequence[int]], list[Load]] | None = getattr(source, "loads", None)
    return [source.load(i) for i in indices] if load_many is None else load_many(indices)
