"""Records: what makes one usable, how it is called, and what lists and reads those of a dataset.

A reader lists every record with its place, so that an index can hold a million of them and read one
again without the others. A record is in LLaVA's format ("conversations" of {from, value}), has
"messages" (see `chat_messages`) or a question with answers beside it (see `questions`); its media
are named beside the text, in "image" or "images" and so on, or in the parts of messages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dflop_jax.data.bounds import MAX_ID, MAX_MEDIA, MAX_NAME, MAX_TURNS, parse_json
from dflop_jax.data.datasets.blob import Blob, Embedded, MediaFile
from dflop_jax.data.datasets.chat_messages import (
    MESSAGE_FIELDS,
    Conversation,
    Turns,
    drop_keys,
    parse_messages,
)
from dflop_jax.data.datasets.questions import (
    ANSWERS,
    MAX_NUMBERED_MEDIA,
    QUESTION,
    SPELLINGS,
    parse_question,
)
from dflop_jax.data.media.kind import Kinds, tag_of
from dflop_jax.data.media.kinds import BUILT_IN
from dflop_jax.data.text.tokenize import (
    BREAK,
    NO_FIELDS,
    ROLES,
    WEIGHT_FIELD,
    TemplateFields,
    answer_weights,
    escape_tags,
)

SYSTEM = "system"  # the field of a record whose conversation has no system turn
OPTIONS = "chat_template_kwargs"  # the field of a record with further variables of its template
VARIABLES = ("tools", "documents", "enable_thinking")
PREVIOUS_ROLES = {
    "human": ("", "gpt"),
    "gpt": ("human", "tool"),
    "tool": ("gpt", "tool"),
}  # a turn's
TEXTS = ("conversations", "messages", QUESTION)


@dataclass(frozen=True)
class Record:
    """One conversation. `media` are (kind, where) in the order of their tags in the turns, `keys`
    what is said of each beside (see `media_keys`); `weights` those of the loss of every answer, ()
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
    """What records may hold, and under which names.

    Attributes:
      columns: field -> column as a user says; other fields have their own names. Of several texts
        the one that it names is read.
      kinds: of media.

    Raises:
      ValueError: columns of fields that there are not.
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
        spellings = {
            name: (name,) for name in ("id", WEIGHT_FIELD, OPTIONS, *VARIABLES, *TEXTS, SYSTEM)
        }
        return {**spellings, **SPELLINGS, **self._media_names}

    @cached_property
    def _media_names(self) -> Mapping[str, tuple[str, ...]]:
        media = {kind.name: (kind.name, f"{kind.name}s") for kind in self.kinds}
        numbers = range(1, MAX_NUMBERED_MEDIA + 1)
        single = {f"{kind.name}_{n}": (f"{kind.name}_{n}",) for kind in self.kinds for n in numbers}
        return media | single

    def missing_media_fields(self, names: Collection[str]) -> set[str]:
        """Fields of media whose columns, as a user names them, are not among these."""
        columns = self.columns.items()
        return {name for name, c in columns if c not in names and name in self._media_names}

    def select_columns(
        self, names: Collection[str], absent_fields: Collection[str] = ()
    ) -> dict[str, str]:
        """Return the column that each field of a record is read from, of those that there are.

        Args:
          without: fields that the record does not have.

        Raises:
          ValueError: a column that a user names is missing.
        """
        columns = {name: c for name, c in self.columns.items() if name not in absent_fields}
        for column in columns.values():
            if column not in names:
                raise ValueError(f"no column {column!r}; there are {_format_names(names)}")
        for name, spellings in self.names.items():
            is_other_text = name in TEXTS and any(text in self.columns for text in TEXTS)
            if is_other_text or name in absent_fields:
                continue
            present = [column for column in spellings if column in names]
            if present:
                columns.setdefault(name, present[0])
        texts = [text for text in TEXTS if text in columns]
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
    """Return a usable record; `find` finds a medium by the name that it has there.

    Args:
      beside: names of its media by kind, of a record that names none.

    Raises:
      ValueError: the reason why it is unusable, with its name (see `record_name`).
    """
    name = label
    try:
        if not isinstance(raw, dict):
            raise ValueError("not a JSON object")
        missing_fields = records.missing_media_fields(
            raw
        )  # a record of text alone needs no column of pictures
        columns = records.select_columns(raw, missing_fields)
        fields = {field: raw[column] for field, column in columns.items()}
        name = record_name(label, fields)
        media = {kind.name: _media_values(fields, kind.name) for kind in records.kinds}
        question: Turns = ()
        if not any(text in fields for text in TEXTS):
            raise ValueError(f"no {', '.join(TEXTS)}; there are {_format_names(raw)}")
        if not any(fields.get(text) for text in TEXTS if text != QUESTION) and QUESTION in fields:
            if ANSWERS not in fields:
                raise ValueError(f"no {' or '.join(SPELLINGS[ANSWERS])} beside its question")
            media = media if any(media.values()) else {**media, **default_media}
            question, media = parse_question(fields, media)
        conversation, weights, template_fields = _parse_turns(fields, records.kinds, question)
        turns, inline = conversation.turns, conversation.media
        read_columns = set(columns.values())
        unread_keys = conversation.unread | {
            str(k) for k, v in raw.items() if k not in read_columns and v not in (None, "", [])
        }
        tags = [t for _, text in turns for t in tag_of(records.kinds).findall(text)]
        if missing_fields and (question or len(inline) < len(tags)):
            records.select_columns(raw)  # which names the column
        if len(inline) < len(tags) and not any(media.values()):
            media |= default_media
        if sum(map(len, media.values())) + len(inline) > MAX_MEDIA:
            raise ValueError(f"more than {MAX_MEDIA} media in one record")
        if media["video"] and not media["image"] and "video" not in tags and not inline:
            # as LLaVA-NeXT writes videos
            turns = tuple((role, text.replace("<image>", "<video>")) for role, text in turns)
        given_by_kind = {kind: len(values) for kind, values in media.items()}
        turns, numbers = _escape_text_tags(
            turns, given_by_kind, inline, conversation.tags_in_text, records.kinds
        )
        tags = [t for _, text in turns for t in tag_of(records.kinds).findall(text)]
        for kind, values in media.items():
            n_tags = sum(tag == kind and k not in inline for k, tag in zip(numbers, tags))
            if n_tags != len(values):
                raise ValueError(f"{n_tags} <{kind}> tags for {len(values)} {kind}s")
        queues = {kind: iter(values) for kind, values in media.items()}
        media_files, keys = [], []
        used_keys = {kind.name: kind.keys for kind in records.kinds}
        for order, (k, tag) in enumerate(zip(numbers, tags)):
            value = inline[k] if k in inline else next(queues[tag])
            default_media = drop_keys(value, "path", "bytes") if isinstance(value, dict) else {}
            medium_keys = {**default_media, **conversation.keys.get(k, {})}
            media_files.append((tag, _media_file(tag, value, order, resolve)))
            keys.append({key: v for key, v in medium_keys.items() if key in used_keys[tag]})
            unread_keys |= medium_keys.keys() - {*used_keys[tag]}
        unread = tuple(sorted(unread_keys))
        return Record(
            name, turns, tuple(media_files), tuple(keys), weights, template_fields, unread
        )
    except (ValueError, OSError) as e:
        raise ValueError(f"{name}: {e}") from e.__cause__  # a `MissingFile`


def record_name(label: str, raw: Any) -> str:
    """Return its place (FILE:LINE or FILE[INDEX]), and the record's id if it has one."""
    record_id = raw.get("id") if isinstance(raw, dict) else None
    if not isinstance(record_id, str | int | float) or record_id == "":
        return label
    return f"{label} id={str(record_id)[:MAX_ID]}"


def split_hash(name: str, label: str) -> int:
    """Return the number below 2**64 that a record draws by its id, or else by its place."""
    key = name.removeprefix(label).removeprefix(" id=") or label
    return int(short_digest(key.encode()), 16)


def short_digest(data: bytes) -> str:
    """Return 16 hexadecimal digits that follow from the bytes."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _format_names(names: Collection[str]) -> str:
    return ", ".join(map(str, names))[:MAX_NAME] or "none"


def _parse_turns(
    fields: Mapping[str, Any], kinds: Kinds, question: Turns
) -> tuple[Conversation, tuple[float, ...], TemplateFields]:
    """Turns, the answers' weights, and what the template is given."""
    raw: Any = [{}] * len(question)
    if question:
        conversation = Conversation(question)
    else:
        field = next((text for text in TEXTS if fields.get(text)), "")
        raw = _parse_json_column(fields.get(field))
        by_column = isinstance(raw, dict) and all(isinstance(v, list) for v in raw.values())
        if by_column and field != "messages":
            raw = [dict(zip(raw, values)) for values in zip(*raw.values())]
        if not isinstance(raw, list) or not raw:
            raise ValueError("no conversations or messages")
        if len(raw) > MAX_TURNS:
            raise ValueError(f"more than {MAX_TURNS} turns in one record")
        if field == "messages":
            conversation = parse_messages(raw, tuple(kind.name for kind in kinds))
        else:
            conversation = Conversation(_parse_llava_turns(raw))
    turns = conversation.turns
    if any(BREAK in text for _, text in turns):
        raise ValueError("text holds U+FDD2, which is no character")
    if system := fields.get(SYSTEM):
        if not isinstance(system, str):
            raise ValueError(f"its {SYSTEM} is {system!r:.50}, not text")
        if turns[0][0] == "system":
            raise ValueError("it has a system field and a system turn; leave one out")
        plain = escape_tags(system, (kind.name for kind in kinds))
        turns, raw = (("system", plain), *turns), [{}, *raw]
    roles = [role for role, _ in turns]
    spoken_roles = roles[roles[0] == "system" :]
    if not spoken_roles or spoken_roles[0] != "human":
        first = spoken_roles[0] if spoken_roles else "system only"
        raise ValueError(f"the first turn is by {first}, not human")
    steps = pairwise(["", *spoken_roles])
    if roles[-1] != "gpt" or any(
        previous_role not in PREVIOUS_ROLES.get(role, ()) for previous_role, role in steps
    ):
        raise ValueError("turns do not alternate human, gpt up to an answer")
    messages = tuple(_template_fields(turn) for turn in raw)
    for (role, text), message in zip(turns, messages, strict=True):
        is_empty = not tag_of(kinds).sub("", text).strip()
        if role == "gpt" and is_empty and not message.get("tool_calls"):
            raise ValueError("an answer is empty")
    weights = answer_weights(raw, roles, fields.get(WEIGHT_FIELD))
    template_fields = TemplateFields(messages if any(messages) else (), _template_variables(fields))
    return conversation._replace(turns=turns), weights, template_fields


def _template_fields(turn: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a turn that are the template's."""
    own_fields = MESSAGE_FIELDS if "role" in turn else MESSAGE_FIELDS | {"from", "value"}
    return {name: v for name, v in turn.items() if name not in own_fields and v is not None}


def _template_variables(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The variables that a record gives its template.

    Raises:
      ValueError: they are no object, or two fields give one.
    """
    record_variables = {name: _parse_json_column(fields.get(name)) for name in VARIABLES}
    variables = {name: value for name, value in record_variables.items() if value is not None}
    options = _parse_json_column(fields.get(OPTIONS))
    options = {} if options is None else options
    if not isinstance(options, dict) or options.keys() & {*variables, "messages"}:
        raise ValueError(f"its {OPTIONS} are no object, or repeat a field of the record")
    return variables | {name: value for name, value in options.items() if value is not None}


def _parse_json_column(value: Any) -> Any:
    """A field's value, parsed where it is a column of JSON."""
    return (parse_json(value.encode()) if value else None) if isinstance(value, str) else value


def _escape_text_tags(
    turns: Turns,
    n_media: Mapping[str, int],
    inline: Collection[int],
    tags_in_text: Collection[int],
    kinds: Kinds,
) -> tuple[Turns, list[int]]:
    """The turns with those tags of answers and of typed parts of text as plain text for which no
    medium is left, the last first, and the numbers of the other tags.

    Args:
      given: media by kind that the record names beside its text.
      inline: numbers of the tags whose media the text itself names.
      in_text: numbers of the tags in typed parts of text.
    """
    tag = tag_of(kinds)
    tags = [t for _, text in turns for t in tag.findall(text)]
    surplus = {kind: tags.count(kind) - n for kind, n in n_media.items()}
    for k in inline:
        surplus[tags[k]] -= 1
    number, escaped_turns, media_tags = len(tags), [], []
    for role, text in reversed(turns):
        for match in reversed([*tag.finditer(text)]):
            number -= 1
            may_be_text = (role == "gpt" or number in tags_in_text) and number not in inline
            if may_be_text and surplus[match[1]] > 0:
                surplus[match[1]] -= 1
                plain = escape_tags(match[0], match.groups())
                text = text[: match.start()] + plain + text[match.end() :]
            else:
                media_tags.append(number)
        escaped_turns.append((role, text))
    return tuple(reversed(escaped_turns)), media_tags[::-1]


def _parse_llava_turns(raw: Any) -> Turns:
    turns = []
    for turn in raw:
        if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
            raise ValueError("a turn is not {from, value} of text")
        if turn.get("from") not in list(ROLES):  # which may be asked for what has no hash
            raise ValueError(f"a turn is from {turn.get('from')!r:.50}, not human, gpt or system")
        turns.append((turn["from"], turn["value"]))
    return tuple(turns)


def _media_values(fields: Mapping[str, Any], kind: str) -> list[Any]:
    """The media of a kind that stand beside the text, in one field or in numbered ones."""
    value = fields.get(kind)
    if isinstance(value, list):
        return value
    single = (fields.get(f"{kind}_{n}") for n in range(1, MAX_NUMBERED_MEDIA + 1))
    return [v for v in (value, *single) if v not in (None, "")]


def _media_file(
    kind: str, value: Any, number: int, resolve: Callable[[str], Path | Blob]
) -> MediaFile:
    """A medium by its path, or by its bytes, which go before a path."""
    path: Any = None
    if isinstance(value, dict):
        path = value.get("path")
        value = path if value.get("bytes") is None else value["bytes"]
    if isinstance(value, bytes):
        return Embedded(value, path if isinstance(path, str) and path else f"{kind} {number}")
    if not isinstance(value, str) or not value:
        raise ValueError(f"{kind!r} is not a path or bytes, or a list of them")
    return resolve(value)
