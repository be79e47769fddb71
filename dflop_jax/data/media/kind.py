"""Kinds of media: what a record may hold beside its text, and what a header says of it.

A kind is known to readers of records, to the index of headers and to templates. How a model takes
media of a kind is another matter: see `medium`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from dflop_jax.data.datasets.blob import MediaFile

Header = Mapping[str, int]
Columns = Mapping[str, np.ndarray]  # headers of n media, each [n]


@dataclass(frozen=True, eq=False)
class Kind:
    """Media that stand under one tag.

    Attributes:
      name: of the tag, <NAME>, and of a record's field.
      noun: how messages call one.
      verb: what a model does with it ("sees").
      columns: by name the integer type of what its header says; kinds may share some.
      header: reads them off a file. ValueError: it is none.
      opened: what a medium is decoded from, given a file.
      described: a header in words.
      too_small: what one is that no model can take, and what to do.
      keys: that a record may give one of them, see `media_keys`; those but `SPAN` are columns.
      extensions: of its files in a shard.
      question: put before a caption of it.
      placeholders: tokens that stand for one where a tokenizer's configuration names none.
      wrapped: whether it stands between the tokens that begin and end a picture, where a tokenizer
        has such.
      preface: text before a wrapped one.
    """

    name: str
    noun: str
    verb: str
    columns: Mapping[str, type]
    header: Callable[[MediaFile], Header]
    opened: Callable[[MediaFile], Any]
    described: Callable[[Header], str]
    too_small: str
    keys: tuple[str, ...] = ()
    extensions: tuple[str, ...] = ()
    question: str = "What is this?"
    placeholders: tuple[str, ...] = ()
    wrapped: bool = False
    preface: str = ""


Kinds = tuple[Kind, ...]


@lru_cache
def tag_of(kinds: Kinds) -> re.Pattern[str]:
    """Return what matches the tag of any kind; its group is the kind's name."""
    return re.compile(f"<({'|'.join(re.escape(kind.name) for kind in kinds)})>")
