"""Parses records. The text of a record is a conversation or a question with answers (see
`conversations`); its media are named in fields such as "image" or "images", or in parts of
messages."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dflop_jax.data.bounds import MAX_NAME_CHARS, MAX_PARTS
from dflop_jax.data.datasets import conversations
from dflop_jax.data.datasets.blob import Blob, Embedded, MediaFile
from dflop_jax.data.datasets.conversations import ANSWERS, QUESTION, SPELLINGS, TEXT_FIELDS, Turns
from dflop_jax.data.media.kind import BUILT_IN, Kinds, tag_of
from dflop_jax.data.text.tokenize import NO_FIELDS, WEIGHT_FIELD, TemplateFields, escape_tags


@dataclass(frozen=True)
class Record:
    """A conversation with its media."""

    name: str
    turns: Turns
    media: tuple[tuple[str, MediaFile], ...]  # (kind, file) in the order of their tags
    keys: tuple[Mapping[str, Any], ...] = ()  # keys of each medium, see `with_keys`
    weights: tuple[float, ...] = ()  # loss weight of each answer; () if all are 1
    fields: TemplateFields = NO_FIELDS
    unread: tuple[str, ...] = ()  # keys that are not read


@dataclass(frozen=True)
class RecordFormat:
    """Fields that records may have, and the columns that hold them.

    Attributes:
      columns: field -> column, as the user names them; other fields have their usual names. If the
        user names a text field, the other text fields are ignored.

    Raises:
      ValueError: columns of unknown fields.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    kinds: Kinds = BUILT_IN

    def __post_init__(self) -> None:
        if unknown := [name for name in self.columns if name not in self.names]:
            fields = [name for name in self.names if not name[-1].isdecimal()]
            raise ValueError(
                f"data.columns names {unknown[0]!r} as a field; write FIELD=COLUMN, fields are "
                f"{', '.join(fields)}"
            )

    @cached_property
    def names(self) -> Mapping[str, tuple[str, ...]]:
        """Fields and the column names that each may have."""
        spellings = {
            name: (name,)
            for name in ("id", WEIGHT_FIELD, *conversations.TEMPLATE_FIELDS, *TEXT_FIELDS)
        }
        return {**spellings, **SPELLINGS, **self.media_names}

    @cached_property
    def media_names(self) -> Mapping[str, tuple[str, ...]]:
        media = {kind.name: (kind.name, f"{kind.name}s") for kind in self.kinds}
        numbers = range(1, conversations.MAX_NUMBERED_MEDIA + 1)
        single = {f"{kind.name}_{n}": (f"{kind.name}_{n}",) for kind in self.kinds for n in numbers}
        return media | single

    def select_columns(
        self, names: Collection[str], absent_fields: Collection[str] = ()
    ) -> dict[str, str]:
        """Return the column that each field of a record is read from.

        Args:
          names: the columns that exist.
          absent_fields: fields that the record does not have.

        Raises:
          ValueError: a column that the user names is missing.
        """
        columns = {name: c for name, c in self.columns.items() if name not in absent_fields}
        for column in columns.values():
            if column not in names:
                raise ValueError(f"no column {column!r}; there are {_format_names(names)}")
        for name, spellings in self.names.items():
            is_other_text = name in TEXT_FIELDS and self.columns.keys() & {*TEXT_FIELDS}
            if is_other_text or name in absent_fields:
                continue
            present = [column for column in spellings if column in names]
            if present:
                columns.setdefault(name, present[0])
        texts = [text for text in TEXT_FIELDS if text in columns]
        if QUESTION in texts[1:] or not texts:  # a conversation has its own answers
            columns = {k: v for k, v in columns.items() if k not in SPELLINGS or k in self.columns}
        return columns


DEFAULT_FORMAT = RecordFormat()


def parse_record(
    label: str,
    raw: Any,
    resolve: Callable[[str], Path | Blob],
    records: RecordFormat = DEFAULT_FORMAT,
    *,
    default_media: Mapping[str, list[str]] = MappingProxyType({}),
) -> Record:
    """Return the record of parsed JSON or of a table's row.

    Args:
      label: name of the record in messages.
      resolve: returns the file of a medium, given its name.
      default_media: names of media by kind, for a record that names none.

    Raises:
      ValueError: the record is unusable; the message has its label and id. The cause is a
        `MissingFile` if a media file is missing.
    """
    name = label
    try:
        if not isinstance(raw, dict):
            raise ValueError("not a JSON object")
        # A record without media needs no media columns.
        media_names = records.media_names
        missing_fields = {
            f for f, c in records.columns.items() if f in media_names and c not in raw
        }
        columns = records.select_columns(raw, missing_fields)
        fields = {field: raw[column] for field, column in columns.items()}
        record_id = fields.get("id")
        if isinstance(record_id, str | int | float) and record_id != "":
            name = f"{label} id={str(record_id)[:MAX_NAME_CHARS]}"
        media = {kind.name: _media_values(fields, kind.name) for kind in records.kinds}
        question: Turns = ()
        if not any(text in fields for text in TEXT_FIELDS):
            raise ValueError(f"no {', '.join(TEXT_FIELDS)}; there are {_format_names(raw)}")
        if QUESTION in fields and not any(
            fields.get(text) for text in conversations.CONVERSATION_FIELDS
        ):
            if ANSWERS not in fields:
                raise ValueError(f"its question has no {' or '.join(SPELLINGS[ANSWERS])}")
            media = media if any(media.values()) else {**media, **default_media}
            question, media = conversations.parse_question(fields, media)
        conversation = conversations.parse_conversation(fields, records.kinds, question)
        needs_media = any(tag.medium is None for tag in conversation.tags)
        if missing_fields and (question or needs_media):
            records.select_columns(raw)  # raises an error that names the column
        if needs_media and not any(media.values()):
            media |= default_media
        turns, matched = _match_media(conversation, media, records.kinds)
        unread = conversation.unread | {
            str(k) for k, v in raw.items() if k not in columns.values() and v not in (None, "", [])
        }
        files, media_keys, unused_keys = _resolve_media(matched, records.kinds, resolve)
        return Record(
            name,
            turns,
            files,
            media_keys,
            conversation.weights,
            conversation.template_fields,
            (*sorted(unread | unused_keys),),
        )
    except (ValueError, OSError) as e:
        raise ValueError(f"{name}: {e}") from e.__cause__


def _resolve_media(
    matched: Sequence[tuple[str, Any, dict[str, Any]]],
    kinds: Kinds,
    resolve: Callable[[str], Path | Blob],
) -> tuple[tuple[Any, ...], tuple[dict[str, Any], ...], set[str]]:
    """Return the files of matched media, the keys of each that are used, and the unused names."""
    used = {kind.name: {*kind.keys} for kind in kinds}
    files = tuple(
        (kind, _media_file(kind, value, number, resolve))
        for number, (kind, value, _) in enumerate(matched)
    )
    media_keys = tuple(
        {key: v for key, v in keys.items() if key in used[kind]} for kind, _, keys in matched
    )
    return files, media_keys, {k for kind, _, keys in matched for k in keys if k not in used[kind]}


def _match_media(
    conversation: conversations.Conversation, media: Mapping[str, list[Any]], kinds: Kinds
) -> tuple[Turns, list[tuple[str, Any, dict[str, Any]]]]:
    """Return the turns with one tag per medium, and (kind, value, keys) of each tag in order. If
    there are more tags than media, tags that may be text are escaped, the last ones first.

    Args:
      media: by kind, media that the record names outside its text.

    Raises:
      ValueError: too many media, or the numbers of tags and media differ.
    """
    turns, tags = conversation.turns, conversation.tags
    if sum(map(len, media.values())) + sum(tag.medium is not None for tag in tags) > MAX_PARTS:
        raise ValueError(f"more than {MAX_PARTS} media in one record")
    if (
        media["video"]
        and not media["image"]
        and all(tag.kind != "video" and tag.medium is None for tag in tags)
    ):  # LLaVA-NeXT tags videos as <image>
        turns = tuple((role, text.replace("<image>", "<video>")) for role, text in turns)
        tags = [tag._replace(kind="video") if tag.kind == "image" else tag for tag in tags]
    unnamed = Counter(tag.kind for tag in tags if tag.medium is None)
    surplus = {kind: unnamed[kind] - len(values) for kind, values in media.items()}
    is_text = []
    for tag in reversed(tags):
        is_text.append(tag.may_be_text and tag.medium is None and surplus[tag.kind] > 0)
        surplus[tag.kind] -= is_text[-1]
    for kind, n in surplus.items():
        if n:
            n_media = len(media[kind])
            raise ValueError(f"{n_media + n} <{kind}> tags for {n_media} {kind}s")
    is_escaped = iter(is_text[::-1])

    def escape(match: re.Match[str]) -> str:
        return escape_tags(match[0], match.groups()) if next(is_escaped) else match[0]

    turns = tuple((role, tag_of(kinds).sub(escape, text)) for role, text in turns)
    queues = {kind: iter(values) for kind, values in media.items()}
    matched = []
    for tag in (tag for tag, escaped in zip(tags, is_text[::-1]) if not escaped):
        value = next(queues[tag.kind]) if tag.medium is None else tag.medium
        own = value if isinstance(value, dict) else {}
        own_keys = conversations.drop_keys_and_none(own, "path", "bytes")
        matched.append((tag.kind, value, {**own_keys, **tag.keys}))
    return turns, matched


def short_digest(data: bytes) -> str:
    """Return a hash of the bytes, 16 hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _format_names(names: Collection[str]) -> str:
    return ", ".join(map(str, names))[:MAX_NAME_CHARS] or "none"


def _media_values(fields: Mapping[str, Any], kind: str) -> list[Any]:
    """Return the media of a kind from the record's field, or from its numbered fields."""
    value = fields.get(kind)
    if isinstance(value, list):
        return value
    single = (fields.get(f"{kind}_{n}") for n in range(1, conversations.MAX_NUMBERED_MEDIA + 1))
    return [v for v in (value, *single) if v not in (None, "")]


def _media_file(
    kind: str, value: Any, number: int, resolve: Callable[[str], Path | Blob]
) -> MediaFile:
    """Return a medium from its bytes if it has them, else from its path."""
    path: Any = None
    if isinstance(value, dict):
        path = value.get("path")
        value = path if value.get("bytes") is None else value["bytes"]
    if isinstance(value, bytes):
        return Embedded(value, path if isinstance(path, str) and path else f"{kind} {number}")
    if not isinstance(value, str) or not value:
        raise ValueError(f"{kind!r} is not a path or bytes, or a list of them")
    return resolve(value)
