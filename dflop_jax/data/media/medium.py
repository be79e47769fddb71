"""How a module of a model takes media: from headers to counts, from files to arrays and text.

A modality is one file: it gives a `Form`, which models name in `preprocessing` and which builds the
`Medium` of a run. Everything else loops over the media of a model and knows none by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from dflop_jax.data.media.kind import Columns, Header, Kinds
from dflop_jax.data.media.limits import Limits
from dflop_jax.data.media.token_sources import TokenSources
from dflop_jax.data.text.chat import ChatTokenizer
from dflop_jax.data.text.tokenize import Tokenizer

TEXT_MODULE = "llm"  # the module that reads the text, in which media stand
Facts = Mapping[str, Any]
Grid = tuple[int, int]  # rows and columns


class MediaCounts(NamedTuple):
    """What n media come to, each int64 [n], or one number for all.

    usable: whether the module can take it at all. pieces: of the module. tokens: that stand for it
    in the text; between: tokens of text that is written among those. longest: the tokens of its
    largest piece, 0 where all pieces of the module are alike.
    """

    usable: np.ndarray
    pieces: np.ndarray
    tokens: np.ndarray
    between: np.ndarray | int = 0
    longest: np.ndarray | int = 0


@dataclass(frozen=True, eq=False)
class DecodedMedium:
    """One medium as arrays.

    fields: by name, of all its pieces one after the other, as in `Sample.fields`.
    lengths: tokens of each of its pieces in the module.
    features: that the module gives for it.
    tokens: of the t tokens that stand for it in the text, where each comes from among its features.
    ids: int64 [t], of what is text among these tokens, -1 of the others.
    grids: rows and columns of its pieces, where they have such.
    """

    fields: Mapping[str, np.ndarray]
    lengths: tuple[int, ...]
    features: int
    tokens: TokenSources
    ids: np.ndarray
    grids: tuple[Grid, ...] = ()


class Medium(Protocol):
    """Media of some kinds under a run's limits: a frozen dataclass, derived from this for what a
    simple one need not say.

    `alone` says whether a medium is the only one of its kind in its sample.
    """

    @property
    def kinds(self) -> Kinds: ...

    @property
    def piece_tokens(self) -> int:
        """Tokens of every piece in the module; 0: they differ, and `lengths` says them."""
        ...

    @property
    def sources(self) -> int:
        """Features that a token of the text is a weighted sum of, 1 for a plain copy."""
        return 1

    @property
    def uses_keys(self) -> bool:
        """Whether a medium's own keys say how it is resized and sampled."""
        return False

    @property
    def blank(self) -> Mapping[str, int]:
        """The value of each field that shows nothing; {} where nothing is blanked."""
        return {}

    @property
    def is_joined(self) -> bool:
        """Whether all pieces of a medium stand together in the text, and are seen as one."""
        return False

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
        """The medium that `Kind.opened` opened, as large as its header says.

        Raises:
          ValueError: it cannot be decoded, or is not what its header says.
        """
        ...

    def text_fields(
        self, stand: np.ndarray, media: Sequence[DecodedMedium]
    ) -> dict[str, np.ndarray]:
        """Further fields of the text, of whose tokens those of the media `stand` (bool [t]); the
        media in the order of the text."""
        return {}


@dataclass(frozen=True)
class Form:
    """A way of taking media, which a model names: the kinds that it takes, and what builds it of a
    model's facts (but its name) under a run's limits, with its tokenizer or to see what the facts
    are worth. ValueError: facts that cannot be."""

    kinds: Kinds
    build: Callable[[Facts, Limits, Tokenizer | ChatTokenizer | None], Medium]


Preparation = Mapping[str, Medium]  # by module, how a run takes media


def module_of(preparation: Preparation, kind: str) -> str:
    """Return the module that takes media of a kind; "" if none does."""
    return next(
        (m for m, medium in preparation.items() if kind in (k.name for k in medium.kinds)), ""
    )


def integer_facts(facts: Facts, *other_names: str, **defaults: int | None) -> list[int]:
    """Return the facts of these names as whole numbers of at least 1, in this order; `usual` where
    the model does not say, None: it has to.

    Raises:
      ValueError: one of them is none, or there are more than these and the `others`.
    """
    values = [facts.get(name, number) for name, number in defaults.items()]
    if not facts.keys() <= {*defaults, *other_names} or any(
        not isinstance(value, int) or value < (number != 0)
        for value, number in zip(values, defaults.values(), strict=True)
    ):
        raise ValueError(f"{', '.join(defaults)} must be at least 1, got {dict(facts)}")
    return values
