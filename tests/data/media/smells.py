"""A made-up modality, as anybody would add one: files of grains, a byte each, sniffed in whiffs."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from dflop_jax.data.datasets.blob import open_media
from dflop_jax.data.media.kind import Kind
from dflop_jax.data.media.medium import DecodedMedium, Form, MediaCounts, Medium, integer_facts
from dflop_jax.data.media.token_sources import copied_sources


def read(source):
    with open_media(source) as file:
        return np.frombuffer(file.read(), np.uint8)


SMELL = Kind(
    name="smell",
    noun="smell",
    verb="smells",
    columns={"grains": np.int32},
    header=lambda source: {"grains": len(read(source))},
    opened=lambda source: source,
    described=lambda header: f"a smell of {header['grains']} grains",
    too_small="too faint a smell; come closer",
    extensions=("smell",),
)


@dataclass(frozen=True)
class Smells(Medium):
    """Whiffs of so many grains; every grain is a token of the text."""

    grains: int
    max_grains = 64

    kinds = (SMELL,)
    blank = MappingProxyType({"values": 0})

    @property
    def piece_tokens(self):
        return self.grains

    def count(self, kind, headers, alone):
        n = np.minimum(headers["grains"], self.max_grains)
        return MediaCounts(n > 1, -(-n // self.grains), n)

    def decode(self, kind, opened, header, alone):
        n = min(header["grains"], self.max_grains)
        whiffs = -(-n // self.grains)
        values = np.zeros((whiffs, self.grains), np.float32)
        values.reshape(-1)[:n] = read(opened)[:n]
        lengths, ids = (self.grains,) * whiffs, np.full(n, -1)
        return DecodedMedium(
            {"values": values}, lengths, values.size, copied_sources(np.arange(n)), ids
        )


def build(facts, limits, tokenizer):
    return Smells(*integer_facts(facts, piece_tokens=None))


FORM = Form(Smells.kinds, build)
