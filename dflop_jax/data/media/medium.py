"""Interface for preparing media for a module: token counts from headers, arrays from files.

Each modality has one file with a `Form`, which models name in `preprocessing`. It builds the
`Medium` of a run. All other code loops over a model's media and knows no modality by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from dflop_jax.config import DataConfig
from dflop_jax.data.media.kind import Columns, Header, Kinds
from dflop_jax.data.media.token_sources import TokenSources
from dflop_jax.data.text.chat import AnyTokenizer

TEXT_MODULE = "llm"  # the module that reads the text with the tokens of media
# Fields of `DataConfig` that limit the size of a sample.
LIMITS = (
    "max_tiles",
    "max_frames",
    "max_tokens",
    "oversize",
    "min_pixels",
    "max_pixels",
    "max_clip_pixels",
    "frames_per_s",
)
GREY = 128  # pixel value of blank pictures
Facts = Mapping[str, Any]
Grid = tuple[int, int]  # rows and columns


class MediaCounts(NamedTuple):
    """Counts of n media, each int64 [n], or one number for all."""

    usable: np.ndarray  # whether the module can take the medium
    pieces: np.ndarray  # pieces in the module
    tokens: np.ndarray  # tokens of its features in the text
    between: np.ndarray | int = 0  # tokens of text between those
    longest: np.ndarray | int = 0  # tokens of its largest piece; 0 if all pieces are equal


@dataclass(frozen=True, eq=False)
class DecodedMedium:
    """A medium as arrays. It takes t tokens in the text."""

    fields: Mapping[str, np.ndarray]  # fields of its pieces, concatenated as in a `Sample`
    lengths: tuple[int, ...]  # tokens of each piece in the module
    features: int  # number of features that the module outputs for it
    tokens: TokenSources  # its features that each of the t tokens reads
    ids: np.ndarray  # int64 [t], ids of text tokens, -1 for features
    grids: tuple[Grid, ...] = ()  # patch grid of each piece, if pieces have one


class Medium(Protocol):
    """Preparation of media of some kinds under a run's limits. Implementations are frozen
    dataclasses that inherit the defaults. `alone`: the only one of its kind in its sample."""

    kinds: ClassVar[Kinds]
    piece_tokens: int  # tokens of every piece in the module; 0: they differ, see `lengths`
    sources: int = 1  # features in the weighted sum of a text token
    is_joined: bool = False  # its pieces are adjacent in the text and attend to each other
    uses_keys: ClassVar[bool] = False  # a record's keys set its resizing and sampling
    blank: ClassVar[Mapping[str, int]] = MappingProxyType({})  # value of each field if blanked

    def count(self, kind: str, headers: Columns, alone: np.ndarray) -> MediaCounts:
        """Return the counts of n media of a kind from their headers [n], without decoding."""
        ...

    def cut(self, kind: str, headers: Columns) -> str:
        """Return a message with the number of media that are cut to their beginning, or ""."""
        return ""

    def lengths(self, kind: str, header: Header) -> tuple[int, ...]:
        """Return the tokens of each piece of a usable medium."""
        raise AssertionError("all pieces are equal")

    def decode(self, kind: str, opened: Any, header: Header, alone: bool) -> DecodedMedium:
        """Return the medium that `Kind.opened` opened. ValueError: it cannot be decoded, or differs
        from its header."""
        ...

    def text_fields(
        self, stand: np.ndarray, media: Sequence[DecodedMedium]
    ) -> dict[str, np.ndarray]:
        """Return additional fields of the text. `stand`: mask of the media's tokens, bool [t];
        `media`: in the order of the text."""
        return {}


@dataclass(frozen=True)
class Form:
    """A way of preparing media, which models name in `preprocessing`."""

    kinds: Kinds
    # called with the model's facts, the run's limits and the tokenizer; ValueError: wrong facts
    build: Callable[[Facts, DataConfig, AnyTokenizer | None], Medium]


Preparation = Mapping[str, Medium]  # the medium of each module that takes media


def module_of(preparation: Preparation, kind: str) -> str:
    """Return the module that takes media of a kind; "" if none does."""
    return next(
        (m for m, medium in preparation.items() if any(k.name == kind for k in medium.kinds)), ""
    )


def integer_facts(facts: Facts, *other_names: str, **defaults: int | None) -> list[int]:
    """Return the facts named by `defaults` as integers in this order. The minimum is 1, or 0 if the
    default is 0; a fact with default None is required. ValueError: a wrong value, or a fact that is
    neither in `defaults` nor in `other_names`."""
    values = [facts.get(name, number) for name, number in defaults.items()]
    if not facts.keys() <= {*defaults, *other_names} or any(
        not isinstance(value, int) or value < (number != 0)
        for value, number in zip(values, defaults.values())
    ):
        raise ValueError(f"{', '.join(defaults)} must be at least 1, got {dict(facts)}")
    return values
