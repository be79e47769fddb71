"""One decoded training example, and what a data source offers to the rest of the program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dflop_jax.records import Load

STREAMS = {"train": 0, "eval": 1}  # what draws of a split begin with


@dataclass(frozen=True, eq=False)
class FeatureGather:
    """Where features of a source module stand among a sample's tokens of a target module.

    index: int32 [target tokens, K], places among the sample's features of the source (those of all
      its pieces, one after the other), -1 for none.
    weight: float32 of the same shape where a token is a weighted sum; None: a plain copy, K = 1.
    """

    index: np.ndarray
    weight: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.index.ndim != 2 or (self.weight is None and self.index.shape[1] != 1):
            raise ValueError(f"places of shape {self.index.shape} need weights, or K = 1")
        if self.weight is not None and self.weight.shape != self.index.shape:
            raise ValueError(f"weights {self.weight.shape} of places {self.index.shape}")


@dataclass(frozen=True, eq=False)
class Sample:
    """A decoded sample: plain arrays by module and name, and how they are joined.

    `fields[module][name]` holds all of the sample's pieces of the module one after the other: dim 0
    counts the tokens of all pieces where every token has a value, else the pieces. `gathers` are by
    (source module, target module); a pair that the sample does not join is absent.
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
    """Return whether a sample may take the places of one of load `limit`: piece by piece of every
    module it is no larger."""
    return all(
        len(lengths) <= len(limit.lengths(module))
        and all(
            n_tokens <= max_tokens for n_tokens, max_tokens in zip(lengths, limit.lengths(module))
        )
        for module, lengths in load.pieces.items()
    )


@dataclass(frozen=True)
class SourceFactory:
    """How another process opens the same source: MODULE:FUNCTION, called with `arguments`, which
    are JSON. The function must not need JAX."""

    function: str
    arguments: Mapping[str, Any]


class Source(Protocol):
    """A dataset with random access. `sample(i).load == load(i)` for every i.

    One that reads other people's files also has `factory: SourceFactory`, so that its samples are
    decoded in processes of their own; any other is decoded in threads. One whose samples differ
    from epoch to epoch has `varies = True`: of n samples, `sample(i + k n)` is then sample i in
    epoch k, with the load of sample i. A mixture has `part_of(index)`, which gives the name of the
    dataset that a sample is from. One with a `digest` of its records is told from others of as many
    samples where a run is resumed. One that knows all of its loads at once has `tail()`, which
    gives samples of which, for every sample, one asks for no less of any module. One that finds
    many loads for less work than one by one has `loads(indices)`.
    """

    @property
    def name(self) -> str: ...

    def __len__(self) -> int: ...

    def load(self, index: int) -> Load:
        """What the sample asks of every module, from headers and text only: nothing is decoded."""
        ...

    def sample(self, index: int) -> Sample:
        """The decoded sample. Raises ValueError, naming it, when it cannot be decoded."""
        ...

    def label(self, index: int) -> str:
        """How logs and errors call the sample."""
        ...


def get_loads(source: Source, indices: Sequence[int]) -> list[Load]:
    """Return the loads of some samples."""
    load_many: Callable[[Sequence[int]], list[Load]] | None = getattr(source, "loads", None)
    return [source.load(i) for i in indices] if load_many is None else load_many(indices)
