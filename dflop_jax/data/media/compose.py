"""Decodes the media of a sample and joins them with its text, in the sizes of its index."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dflop_jax.data.datasets.record_parser import Record
from dflop_jax.data.datasets.record_table import RecordTable
from dflop_jax.data.media.counts import build_load
from dflop_jax.data.media.kind import Header
from dflop_jax.data.media.medium import TEXT_MODULE, DecodedMedium, Preparation, module_of
from dflop_jax.data.media.token_sources import SOURCES, is_from_patches, shift_sources
from dflop_jax.data.sample import FeatureGather, Sample
from dflop_jax.data.text.tokenize import TokenRun

# number of a medium in the record -> (module that takes it, medium)
DecodedMedia = Mapping[int, tuple[str, DecodedMedium]]


def decode_media(
    record: Record,
    table: RecordTable,
    row: int,
    preparation: Preparation,
    numbers: Collection[int] | None = None,
) -> DecodedMedia:
    """Return the decoded media of the record in this row of `table`, only these numbers (None:
    all). ValueError: a file cannot be decoded, or differs from its index."""
    headers = table.headers(row)
    if [kind.name for kind, _ in headers] != [kind for kind, _ in record.media]:
        raise ValueError(f"{record.name}: {len(record.media)} media, {len(headers)} in the index")
    opened = [
        (kind.name, kind.opened(source), header)
        for (kind, header), (_, source) in zip(headers, record.media, strict=True)
    ]
    return decode_opened(opened, preparation, numbers)


def decode_opened(
    media: Sequence[tuple[str, Any, Header]],
    preparation: Preparation,
    numbers: Collection[int] | None = None,
) -> DecodedMedia:
    """Return the same for media given as (kind, result of `Kind.opened`, header)."""
    kinds = [kind for kind, _, _ in media]
    decoded = {}
    for number, (kind, opened, header) in enumerate(media):
        if numbers is None or number in numbers:
            module = module_of(preparation, kind)
            medium = preparation[module].decode(kind, opened, header, kinds.count(kind) == 1)
            decoded[number] = module, medium
    return decoded


def compose_sample(
    token_runs: Sequence[TokenRun],
    media: DecodedMedia,
    preparation: Preparation,
    *,
    placeholder: int,
) -> Sample:
    """Return the sample of tokenized text and decoded media: fields of the text module (tokens,
    targets, weights, is_visual, is_newline, fields that media add) and of each medium's module.
    Tokens of media have the id `placeholder`, which is not embedded."""
    if sorted(p.medium for p in token_runs if p.medium >= 0) != sorted(media):
        raise ValueError(f"the text does not place each of {len(media)} media once")
    runs = [media[p.medium][1].ids if p.medium >= 0 else p.ids for p in token_runs]
    ends = np.cumsum([0, *map(len, runs)])
    # first token of each medium, in the order of the text
    starts = {p.medium: n for p, n in zip(token_runs, ends.tolist()) if p.medium >= 0}
    ids, n = np.concatenate([np.zeros(0, np.int64), *runs]).astype(np.int64), int(ends[-1])
    weights = np.array([p.weight if p.supervised else 0.0 for p in token_runs], np.float32)
    tokens = np.where(ids >= 0, ids, placeholder).astype(np.int32)
    own_weights = np.repeat(weights, np.diff(ends))
    # for each token the next one, and the loss weight of predicting it
    targets, next_weights = np.zeros(n, np.int32), np.zeros(n, np.float32)
    targets[:-1], next_weights[:-1] = tokens[1:], own_weights[1:]
    text = {
        "tokens": tokens,
        "targets": targets,
        "weights": next_weights,
        "is_visual": np.zeros(n, bool),
        "is_newline": np.zeros(n, bool),
    }
    fields: dict[str, Mapping[str, np.ndarray]] = {TEXT_MODULE: text}
    gathers, lengths, run_lengths = {}, {}, {}
    for module, medium in preparation.items():
        selected = {k: decoded for k, (m, decoded) in media.items() if m == module}
        sources, n_features = np.zeros(n, SOURCES), 0
        for k, decoded in selected.items():
            stop = starts[k] + len(decoded.tokens)
            sources[starts[k] : stop] = shift_sources(decoded.tokens, n_features)
            n_features += decoded.features
        is_visual = is_from_patches(sources)
        text["is_visual"] |= is_visual
        text["is_newline"] |= sources["newline"]
        text |= medium.text_fields(is_visual, [selected[k] for k in starts if k in selected])
        lengths[module] = tuple(length for d in selected.values() for length in d.lengths)
        if medium.is_joined:
            run_lengths[module] = [len(decoded.lengths) for decoded in selected.values()]
        if lengths[module]:
            fields[module] = {
                name: np.concatenate([decoded.fields[name] for decoded in selected.values()])
                for name in next(iter(selected.values())).fields
            }
            weight = np.ascontiguousarray(sources["weight"])
            index = np.where(weight > 0, sources["index"], -1)
            gathers[module, TEXT_MODULE] = (
                FeatureGather(index, weight) if medium.sources > 1 else FeatureGather(index[:, :1])
            )
    return Sample(fields, gathers, build_load(lengths, n, run_lengths))


def blank_media(sample: Sample, preparation: Preparation) -> Sample:
    """Return the sample with blank media."""
    fields = {m: dict(named) for m, named in sample.fields.items()}
    for module, medium in preparation.items():
        for name, value in medium.blank.items():
            if name in fields.get(module, {}):
                fields[module][name] = np.full_like(fields[module][name], value)
    return replace(sample, fields=fields)
