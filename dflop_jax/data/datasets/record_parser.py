"""Records: which fields they may have, and what makes one usable.

The text of a record is a conversation (see `conversations`) or a question with answers (see
`questions`); its media are named in fields such as "image" or "images", or in parts of messages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dflop_jax.data.bounds import MAX_ID_CHARS, MAX_MEDIA, MAX_NAME_CHARS
from dflop_jax.data.datasets.blob import Blob, Embedded, MediaFile
from dflop_jax.data.datasets.conversations import (
    CONVERSATION_FIELDS,
    OPTIONS_FIELD,
    SYSTEM_FIELD,
    VARIABLE_FIELDS,
    Conversation,
    Turns,
    drop_keys,
    escape_text_tags,
    find_tags,
    parse_turns,
)
from dflop_jax.data.datasets.questions import (
    ANSWERS,
    MAX_NUMBERED_MEDIA,
    QUESTION,
    SPELLINGS,
    parse_question,
)
from dflop_jax.data.media.kind import Kinds
from dflop_jax.data.media.kinds import BUILT_IN
from dflop_jax.data.text.tokenize import NO_FIELDS, WEIGHT_FIELD, TemplateFields

TEXT_FIELDS = (*CONVERSATION_FIELDS, QUESTION)
TEMPLATE_FIELDS = (SYSTEM_FIELD, OPTIONS_FIELD, *VARIABLE_FIELDS)


@dataclass(frozen=True)
class Record:
    """One conversation. `media` are (kind, file) in the order of their tags in the turns, `keys`
    the media keys of each (see `media_keys`); `weights` are those of the loss of every answer, ()
    where all are 1. `fields` go to the chat template; `unread` are keys that are not read."""

    name: str
    turns: Turns
    media: tuple[tuple[str, MediaFile], ...]
    keys: tuple[Mapping[str, Any], ...] = ()
    weights: tuple[float, ...] = ()
    fields: TemplateFields = NO_FIELDS
    unread: tuple[str, ...] = ()


@dataclass(frozen=True)
class RecordFormat:
    """Which fields records may have, and under which names.

    Attributes:
      columns: field -> column, as the user names them; other fields have their own names. If the
        user names a text field, the other text fields are ignored.
      kinds: of media.

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
        """The fields, and the names that each may have."""
        spellings = {name: (name,) for name in ("id", WEIGHT_FIELD, *TEMPLATE_FIELDS, *TEXT_FIELDS)}
        return {**spellings, **SPELLINGS, **self._media_names}

    @cached_property
    def _media_names(self) -> Mapping[str, tuple[str, ...]]:
        media = {kind.name: (kind.name, f"{kind.name}s") for kind in self.kinds}
        numbers = range(1, MAX_NUMBERED_MEDIA + 1)
        single = {f"{kind.name}_{n}": (f"{kind.name}_{n}",) for kind in self.kinds for n in numbers}
        return media | single

    def missing_media_fields(self, names: Collection[str]) -> set[str]:
        """Return the media fields whose columns, as the user names them, are not among `names`."""
        columns = self.columns.items()
        return {name for name, c in columns if c not in names and name in self._media_names}

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
        if QUESTION in texts[1:] or not texts:  # a conversation has its own
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
    """Return a usable record.

    Args:
      label: names the record in messages.
      resolve: returns the file of a medium by its name.
      default_media: names of its media by kind, for a record that names none.

    Raises:
      ValueError: why the record is unusable, with its name (see `record_name`). The cause is a
        `MissingFile` where a file of media is missing.
    """
    name = label
    try:
        if not isinstance(raw, dict):
            raise ValueError("not a JSON object")
        # A record of text alone needs no column of pictures.
        missing_fields = records.missing_media_fields(raw)
        columns = records.select_columns(raw, missing_fields)
        fields = {field: raw[column] for field, column in columns.items()}
        name = record_name(label, fields)
        media = {kind.name: _media_values(fields, kind.name) for kind in records.kinds}
        question: Turns = ()
        if not any(text in fields for text in TEXT_FIELDS):
            raise ValueError(f"no {', '.join(TEXT_FIELDS)}; there are {_format_names(raw)}")
        if QUESTION in fields and not any(fields.get(t) for t in TEXT_FIELDS if t != QUESTION):
            if ANSWERS not in fields:
                raise ValueError(f"no {' or '.join(SPELLINGS[ANSWERS])} beside its question")
            media = media if any(media.values()) else {**media, **default_media}
            question, media = parse_question(fields, media)
        conversation, weights, template_fields = parse_turns(fields, records.kinds, question)
        tags = find_tags(conversation.turns, records.kinds)
        if missing_fields and (question or len(conversation.media) < len(tags)):
            records.select_columns(raw)  # raises an error that names the column
        if len(conversation.media) < len(tags) and not any(media.values()):
            media |= default_media
        turns, matched = _match_media(conversation, media, records.kinds)
        used_keys = {kind.name: {*kind.keys} for kind in records.kinds}
        read_columns = {*columns.values()}
        unread = conversation.unread | {
            str(k) for k, v in raw.items() if k not in read_columns and v not in (None, "", [])
        }
        files = []
        for number, (kind, value, keys) in enumerate(matched):
            files.append((kind, _media_file(kind, value, number, resolve)))
            unread |= keys.keys() - used_keys[kind]
        media_keys = tuple(
            {key: v for key, v in keys.items() if key in used_keys[kind]}
            for kind, _, keys in matched
        )
        return Record(
            name, turns, tuple(files), media_keys, weights, template_fields, (*sorted(unread),)
        )
    except (ValueError, OSError) as e:
        raise ValueError(f"{name}: {e}") from e.__cause__


def _match_media(
    conversation: Conversation, media: Mapping[str, list[Any]], kinds: Kinds
) -> tuple[Turns, list[tuple[str, Any, dict[str, Any]]]]:
    """Return the turns with a tag for each medium, and (kind, value, keys) of each tag in order.

    Args:
      media: by kind, those that the record names beside its text.

    Raises:
      ValueError: too many media, or other tags than media.
    """
    turns, inline = conversation.turns, conversation.media
    if sum(map(len, media.values())) + len(inline) > MAX_MEDIA:
        raise ValueError(f"more than {MAX_MEDIA} media in one record")
    has_video_tag = "video" in find_tags(turns, kinds)
    if media["video"] and not media["image"] and not has_video_tag and not inline:
        # as LLaVA-NeXT writes videos
        turns = tuple((role, text.replace("<image>", "<video>")) for role, text in turns)
    n_media = {kind: len(values) for kind, values in media.items()}
    turns, numbers = escape_text_tags(turns, n_media, inline, conversation.tags_in_text, kinds)
    tags = find_tags(turns, kinds)
    for kind, n in n_media.items():
        n_tags = sum(tag == kind and k not in inline for k, tag in zip(numbers, tags))
        if n_tags != n:
            raise ValueError(f"{n_tags} <{kind}> tags for {n} {kind}s")
    queues = {kind: iter(values) for kind, values in media.items()}
    matched = []
    for k, tag in zip(numbers, tags):
        value = inline[k] if k in inline else next(queues[tag])
        own_keys = drop_keys(value, "path", "bytes") if isinstance(value, dict) else {}
        matched.append((tag, value, {**own_keys, **conversation.keys.get(k, {})}))
    return turns, matched


def record_name(label: str, raw: Any) -> str:
    """Return its label (FILE:LINE or FILE[INDEX]), with the record's id if it has one."""
    record_id = raw.get("id") if isinstance(raw, dict) else None
    if not isinstance(record_id, str | int | float) or record_id == "":
        return label
    return f"{label} id={str(record_id)[:MAX_ID_CHARS]}"


def split_hash(name: str, label: str) -> int:
    """Return a number below 2**64 that follows from the record's id, else from its label."""
    key = name.removeprefix(label).removeprefix(" id=") or label
    return int(short_digest(key.encode()), 16)


def short_digest(data: bytes) -> str:
    """Return 16 hexadecimal digits that follow from the bytes."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _format_names(names: Collection[str]) -> str:
    return ", ".join(map(str, names))[:MAX_NAME_CHARS] or "none"


def _media_values(fields: Mapping[str, Any], kind: str) -> list[Any]:
    """Return the media of a kind that are named beside the text, in one field or in numbered
    ones."""
    value = fields.get(kind)
    if isinstance(value, list):
        return value
    single = (fields.get(f"{kind}_{n}") for n in range(1, MAX_NUMBERED_MEDIA + 1))
    return [v for v in (value, *single) if v not in (None, "")]


def _media_file(
    kind: str, value: Any, number: int, resolve: Callable[[str], Path | Blob]
) -> MediaFile:
    """Return a medium by its bytes, else by its path."""
    path: Any = None
    if isinstance(value, dict):
        path = value.get("path")
        value = path if value.get("bytes") is None else value["bytes"]
    if isinstance(value, bytes):
        return Embedded(value, path if isinstance(path, str) and path else f"{kind} {number}")
    if not isinstance(value, str) or not value:
        raise ValueError(f"{kind!r} is not a path or bytes, or a list of them")
    return resolve(value)
