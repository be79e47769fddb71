"""How a module of a model takes media: from headers to counts, from files to arrays and text.

A modality is one file: it gives a `Form`, which models name in `preprocessing` and which builds the
`Medium` of a run. Everything else loops over the media of a model and knows none by name.
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

TEXT_MODULE = "llm"  # the module that reads the text, in which media stand
# Fields of `DataConfig` that decide how large a sample may be, and what happens to a larger one.
LIMITS = (
    "max_tiles", "max_frames", "max_tokens", "oversize", "min_pixels", "max_pixels",
    "max_clip_pixels", "frames_per_s",
)  # fmt: skip
GREY = 128  # of blank pictures, in 0 to 255
Facts = Mapping[str, Any]
Grid = tuple[int, int]  # rows and columns


class MediaCounts(NamedTuple):
    """What n media come to, each int64 [n], or one number for all."""

    usable: np.ndarray  # whether the module can take it at all
    pieces: np.ndarray  # of the module
    tokens: np.ndarray  # that stand for it in the text
    between: np.ndarray | int = 0  # tokens of text that is written among those
    longest: np.ndarray | int = 0  # tokens of its largest piece, 0 where all pieces are alike


@dataclass(frozen=True, eq=False)
class DecodedMedium:
    """One medium as arrays."""

    fields: Mapping[str, np.ndarray]  # of all its pieces one after the other, as in a `Sample`
    lengths: tuple[int, ...]  # tokens of each of its pieces in the module
    features: int  # that the module gives for it
    tokens: TokenSources  # of the t tokens that stand for it in the text, over its features
    ids: np.ndarray  # int64 [t], of what is text among these tokens, -1 of the others
    grids: tuple[Grid, ...] = ()  # of its pieces, where they have such


class Medium(Protocol):
    """Media of some kinds under a run's limits: a frozen dataclass, derived from this for what a
    simple one need not say. `alone`: it is the only one of its kind in its sample."""

    kinds: ClassVar[Kinds]
    piece_tokens: int  # of every piece in the module; 0: they differ, and `lengths` says them
    sources: int = 1  # features that a token of the text is a weighted sum of
    is_joined: bool = False  # all pieces stand together in the text, and are seen as one
    uses_keys: ClassVar[bool] = False  # its own keys say how it is resized and sampled
    blank: ClassVar[Mapping[str, int]] = MappingProxyType({})  # the value of fields shown blank

    def count(self, kind: str, headers: Columns, alone: np.ndarray) -> MediaCounts:
        """What n media of a kind come to, from their headers, each [n]; nothing is decoded."""
        ...

    def cut(self, kind: str, headers: Columns) -> str:
        """Says how many of n media the model takes only the beginning of, "" for none."""
        return ""

    def lengths(self, kind: str, header: Header) -> tuple[int, ...]:
        """Tokens of each piece of a usable medium."""
        raise AssertionError("all pieces are alike")

    def decode(self, kind: str, opened: Any, header: Header, alone: bool) -> DecodedMedium:
        """The medium that `Kind.opened` opened, as large as its header says. ValueError: it cannot
        be decoded, or is not what its header says."""
        ...

    def text_fields(
        self, stand: np.ndarray, media: Sequence[DecodedMedium]
    ) -> dict[str, np.ndarray]:
        """Further fields of the text, of whose tokens those of the media `stand` (bool [t]); the
        media in the order of the text."""
        return {}


@dataclass(frozen=True)
class Form:
    """A way of taking media, which a model names."""

    kinds: Kinds
    # of a model's facts, under a run's limits, with its tokenizer; ValueError: facts that cannot be
    build: Callable[[Facts, DataConfig, AnyTokenizer | None], Medium]


Preparation = Mapping[str, Medium]  # by module, how a run takes media


def module_of(preparation: Preparation, kind: str) -> str:
    """Return the module that takes media of a kind; "" if none does."""
    return next((m for m, medium in preparation.items()
                 if any(k.name == kind for k in medium.kinds)), "")  # fmt: skip


def integer_facts(facts: Facts, *other_names: str, **defaults: int | None) -> list[int]:
    """Return the facts named by `defaults` as whole numbers, in this order; at least 1, or 0 where
    that is the default; None: the model has to say it. ValueError: one of them is none, or there
    are more than these and the `other_names`."""
    values = [facts.get(name, number) for name, number in defaults.items()]
    if not facts.keys() <= {*defaults, *other_names} or any(
        not isinstance(value, int) or value < (number != 0)
        for value, number in zip(values, defaults.values())
    ):
        raise ValueError(f"{', '.join(defaults)} must be at least 1, got {dict(facts)}")
    return values
