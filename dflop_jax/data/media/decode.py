"""The media of one sample, decoded to exactly what its index promises."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dflop_jax.data.datasets.llava_records import Record
from dflop_jax.data.datasets.shape_index import ShapeTable
from dflop_jax.data.media.kind import Header
from dflop_jax.data.media.medium import Decoded, Preparation, module_of

# by its number in the record, each medium with the module that takes it
DecodedMedia = Mapping[int, tuple[str, Decoded]]


def decode_media(
    record: Record,
    table: ShapeTable,
    row: int,
    how: Preparation,
    kept: Collection[int] | None = None,
) -> DecodedMedia:
    """Return the decoded media of the record whose header is a row of `table`, those of the numbers
    `kept` (None: all).

    Raises:
      ValueError: a file that cannot be decoded, or is not what it was when it was indexed, or that
        the model does not take.
    """
    headers = table.headers(row)
    if [kind.name for kind, _ in headers] != [kind for kind, _ in record.media]:
        raise ValueError(f"{record.name}: {len(record.media)} media, {len(headers)} in the index")
    for kind, _ in headers:
        if not module_of(how, kind.name):
            raise ValueError(f"{record.name}: the model takes no {kind.name}")
    opened = [
        (kind.name, kind.opened(source), header)
        for (kind, header), (_, source) in zip(headers, record.media, strict=True)
    ]
    return decode_opened(opened, how, kept)


def decode_opened(
    media: Sequence[tuple[str, Any, Header]],
    how: Preparation,
    kept: Collection[int] | None = None,
    modules: Collection[str] | None = None,
) -> DecodedMedia:
    """Return the decoded media of a sample, given as (kind, what `Kind.opened` gives, header),
    those of the numbers `kept` (None: all); of other modules than `modules` (None: all) they may
    be without fields."""
    kinds = [kind for kind, _, _ in media]
    decoded = {}
    for number, (kind, opened, header) in enumerate(media):
        if kept is not None and number not in kept:
            continue
        module = module_of(how, kind)
        alone = kinds.count(kind) == 1
        seen = modules is None or module in modules
        unseen = None if seen else how[module].unseen(kind, header, alone)
        decoded[number] = module, unseen or how[module].decode(kind, opened, header, alone)
    return decoded
