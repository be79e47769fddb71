"""Records: what makes one usable, how it is called, and what lists and reads those of a dataset.

A reader lists every record with its place, so that an index can hold a million of them and read one
again without the others. A record is in LLaVA's format ("conversations" of {from, value}), has
"messages" (see `chat_messages`) or a question with answers beside it (see `questions`); its media
are named beside the text, in "image" or "images" and so on, or in the parts of messages.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dflop_jax.data.bounds import MAX_ID, MAX_MEDIA, MAX_NAME, MAX_TURNS, parse_json
from dflop_jax.data.datasets.blob import Blob, Embedded, MediaFile
from dflop_jax.data.datasets.chat_messages import OWN, Talk, Turns, turns_of_messages, without
from dflop_jax.data.datasets.questions import ANSWERS, MOST_NUMBERED, QUESTION, SPELLINGS, asked
from dflop_jax.data.media.kind import Kinds, tag_of
from dflop_jax.data.media.kinds import BUILT_IN
from dflop_jax.data.text.tokenize import (
    BREAK,
    NO_FIELDS,
    ROLES,
    WEIGHT,
    TemplateFields,
    answer_weights,
    as_text,
)

SYSTEM = "system"  # the field of a record whose conversation has no system turn
OPTIONS = "chat_template_kwargs"  # the field of a record with further variables of its template
VARIABLES = ("tools", "documents", "enable_thinking")
BEFORE = {"human": ("", "gpt"), "gpt": ("human", "tool"), "tool": ("gpt", "tool")}  # a turn's
TEXTS = ("conversations", "messages", QUESTION)


@dataclass(frozen=True)
class Record:
    """One conversation. `media` are (kind, where) in the order of their tags in the turns, `keys`
    what is said of each beside (see `part_keys`); `weights` those of the loss of every answer, ()
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
            known = [name for name in self.names if not name[-1].isdecimal()]
            raise ValueError(
                f"data.columns names {unknown[0]!r} as a field; write FIELD=COLUMN, fields are "
                f"{', '.join(known)}"
            )

    @cached_property
    def names(self) -> Mapping[str, tuple[str, ...]]:
        """The fields, and the names that each may have."""
        own = {name: (name,) for name in ("id", WEIGHT, OPTIONS, *VARIABLES, *TEXTS, SYSTEM)}
        return {**own, **SPELLINGS, **self._media_names}

    @cached_property
    def _media_names(self) -> Mapping[str, tuple[str, ...]]:
        media = {kind.name: (kind.name, f"{kind.name}s") for kind in self.kinds}
        numbers = range(1, MOST_NUMBERED + 1)
        single = {f"{kind.name}_{n}": (f"{kind.name}_{n}",) for kind in self.kinds for n in numbers}
        return media | single

    def lacking(self, names: Collection[str]) -> set[str]:
        """Fields of media whose columns, as a user names them, are not among these."""
        columns = self.columns.items()
        return {name for name, c in columns if c not in names and name in self._media_names}

    def chosen(self, names: Collection[str], without: Collection[str] = ()) -> dict[str, str]:
        """Return the column that each field of a record is read from, of those that there are.

        Args:
          without: fields that the record does not have.

        Raises:
          ValueError: a column that a user names is missing.
        """
        chosen = {name: c for name, c in self.columns.items() if name not in without}
        for column in chosen.values():
            if column not in names:
                raise ValueError(f"no column {column!r}; there are {_listed_names(names)}")
        for name, spellings in self.names.items():
            is_other_text = name in TEXTS and any(text in self.columns for text in TEXTS)
            if is_other_text or name in without:
                continue
            present = [column for column in spellings if column in names]
            if present:
                chosen.setdefault(name, present[0])
        texts = [text for text in TEXTS if text in chosen]
        if QUESTION in texts[1:] or not texts:  # a conversation has its own
            chosen = {k: v for k, v in chosen.items() if k not in SPELLINGS or k in self.columns}
        return chosen


@dataclass(frozen=True)
class Located:
    """A record's place: bytes of `files[file]` (a shard's: from its first member on), its number
    there (a line's, in a file of lines), and its name for messages."""

    place: str
    number: int
    file: int
    offset: int
    size_bytes: int


class RecordReader(ABC):
    """A dataset of records; `files` are all that its records stand in."""

    def __init__(self, files: tuple[Path, ...]) -> None:
        self.files = files
        rest = f" and {len(files) - 1} more" if len(files) > 1 else ""
        self.name = f"{files[0]}{rest}"

    @abstractmethod
    def locate(self) -> Iterator[Located]:
        """Yield every record, in order. ValueError: a file that cannot be read at all."""

    def place(self, file: int, number: int) -> str:
        """How messages call a record without reading it."""
        return f"{self.files[file].name}[{number}]"

    @abstractmethod
    def read(self, located: Located) -> Record:
        """Return a usable record. ValueError: its name and the reason why it is not usable."""


USUAL = RecordFormat()


def parse_record(
    place: str,
    raw: Any,
    find: Callable[[str], Path | Blob],
    records: RecordFormat = USUAL,
    *,
    beside: Mapping[str, list[str]] = MappingProxyType({}),
) -> Record:
    """Return a usable record; `find` finds a medium by the name that it has there.

    Args:
      beside: names of its media by kind, of a record that names none.

    Raises:
      ValueError: the reason why it is unusable, with its name (see `record_name`).
    """
    name = place
    try:
        if not isinstance(raw, dict):
            raise ValueError("not a JSON object")
        lacking = records.lacking(raw)  # a record of text alone needs no column of pictures
        chosen = records.chosen(raw, lacking)
        fields = {field: raw[column] for field, column in chosen.items()}
        name = record_name(place, fields)
        media = {kind.name: _listed(fields, kind.name) for kind in records.kinds}
        question: Turns = ()
        if not any(text in fields for text in TEXTS):
            raise ValueError(f"no {', '.join(TEXTS)}; there are {_listed_names(raw)}")
        if not any(fields.get(text) for text in TEXTS if text != QUESTION) and QUESTION in fields:
            if ANSWERS not in fields:
                raise ValueError(f"no {' or '.join(SPELLINGS[ANSWERS])} beside its question")
            media = media if any(media.values()) else {**media, **beside}
            question, media = asked(fields, media)
        talk, weights, further = _turns(fields, records.kinds, question)
        turns, inline = talk.turns, talk.media
        read = set(chosen.values())
        others = talk.unread | {
            str(k) for k, v in raw.items() if k not in read and v not in (None, "", [])
        }
        tags = [t for _, text in turns for t in tag_of(records.kinds).findall(text)]
        if lacking and (question or len(inline) < len(tags)):
            records.chosen(raw)  # which names the column
        if len(inline) < len(tags) and not any(media.values()):
            media |= beside
        if sum(map(len, media.values())) + len(inline) > MAX_MEDIA:
            raise ValueError(f"more than {MAX_MEDIA} media in one record")
        if media["video"] and not media["image"] and "video" not in tags and not inline:
            # as LLaVA-NeXT writes videos
            turns = tuple((role, text.replace("<image>", "<video>")) for role, text in turns)
        given_by_kind = {kind: len(values) for kind, values in media.items()}
        turns, numbers = _with_text_tags(turns, given_by_kind, inline, talk.in_text, records.kinds)
        tags = [t for _, text in turns for t in tag_of(records.kinds).findall(text)]
        for kind, values in media.items():
            wanted = sum(tag == kind and k not in inline for k, tag in zip(numbers, tags))
            if wanted != len(values):
                raise ValueError(f"{wanted} <{kind}> tags for {len(values)} {kind}s")
        queues = {kind: iter(values) for kind, values in media.items()}
        opened, keys = [], []
        used = {kind.name: kind.keys for kind in records.kinds}
        for order, (k, tag) in enumerate(zip(numbers, tags)):
            value = inline[k] if k in inline else next(queues[tag])
            beside = without(value, "path", "bytes") if isinstance(value, dict) else {}
            said = {**beside, **talk.keys.get(k, {})}
            opened.append((tag, _found(tag, value, order, find)))
            keys.append({key: v for key, v in said.items() if key in used[tag]})
            others |= said.keys() - {*used[tag]}
        unread = tuple(sorted(others))
        return Record(name, turns, tuple(opened), tuple(keys), weights, further, unread)
    except (ValueError, OSError) as e:
        raise ValueError(f"{name}: {e}") from e.__cause__  # a `NoFile`


def record_name(place: str, raw: Any) -> str:
    """Return its place (FILE:LINE or FILE[INDEX]), and the record's id if it has one."""
    record_id = raw.get("id") if isinstance(raw, dict) else None
    if not isinstance(record_id, str | int | float) or record_id == "":
        return place
    return f"{place} id={str(record_id)[:MAX_ID]}"


def lot(name: str, place: str) -> int:
    """Return the number below 2**64 that a record draws by its id, or else by its place."""
    key = name.removeprefix(place).removeprefix(" id=") or place
    return int(short_digest(key.encode()), 16)


def short_digest(data: bytes) -> str:
    """Return 16 hexadecimal digits that follow from the bytes."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _listed_names(names: Collection[str]) -> str:
    return ", ".join(map(str, names))[:MAX_NAME] or "none"


def _turns(
    fields: Mapping[str, Any], kinds: Kinds, question: Turns
) -> tuple[Talk, tuple[float, ...], TemplateFields]:
    """Turns, the answers' weights, and what the template is given."""
    raw: Any = [{}] * len(question)
    if question:
        talk = Talk(question)
    else:
        field = next((text for text in TEXTS if fields.get(text)), "")
        raw = _parsed(fields.get(field))
        by_column = isinstance(raw, dict) and all(isinstance(v, list) for v in raw.values())
        if by_column and field != "messages":
            raw = [dict(zip(raw, values)) for values in zip(*raw.values())]
        if not isinstance(raw, list) or not raw:
            raise ValueError("no conversations or messages")
        if len(raw) > MAX_TURNS:
            raise ValueError(f"more than {MAX_TURNS} turns in one record")
        if field == "messages":
            talk = turns_of_messages(raw, tuple(kind.name for kind in kinds))
        else:
            talk = Talk(_conversation(raw))
    turns = talk.turns
    if any(BREAK in text for _, text in turns):
        raise ValueError("text holds U+FDD2, which is no character")
    if system := fields.get(SYSTEM):
        if not isinstance(system, str):
            raise ValueError(f"its {SYSTEM} is {system!r:.50}, not text")
        if turns[0][0] == "system":
            raise ValueError("it has a system field and a system turn; leave one out")
        plain = as_text(system, (kind.name for kind in kinds))
        turns, raw = (("system", plain), *turns), [{}, *raw]
    roles = [role for role, _ in turns]
    others = roles[roles[0] == "system" :]
    if not others or others[0] != "human":
        first = others[0] if others else "system only"
        raise ValueError(f"the first turn is by {first}, not human")
    steps = pairwise(["", *others])
    if roles[-1] != "gpt" or any(last not in BEFORE.get(role, ()) for last, role in steps):
        raise ValueError("turns do not alternate human, gpt up to an answer")
    messages = tuple(_further(turn) for turn in raw)
    for (role, text), more in zip(turns, messages, strict=True):
        is_empty = not tag_of(kinds).sub("", text).strip()
        if role == "gpt" and is_empty and not more.get("tool_calls"):
            raise ValueError("an answer is empty")
    weights = answer_weights(raw, roles, fields.get(WEIGHT))
    further = TemplateFields(messages if any(messages) else (), _variables(fields))
    return talk._replace(turns=turns), weights, further


def _further(turn: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a turn that are the template's."""
    own = OWN if "role" in turn else OWN | {"from", "value"}
    return {name: v for name, v in turn.items() if name not in own and v is not None}


def _variables(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The variables that a record gives its template.

    Raises:
      ValueError: they are no object, or two fields give one.
    """
    given = {name: _parsed(fields.get(name)) for name in VARIABLES}
    found = {name: value for name, value in given.items() if value is not None}
    options = _parsed(fields.get(OPTIONS))
    options = {} if options is None else options
    if not isinstance(options, dict) or options.keys() & {*found, "messages"}:
        raise ValueError(f"its {OPTIONS} are no object, or repeat a field of the record")
    return found | {name: value for name, value in options.items() if value is not None}


def _parsed(value: Any) -> Any:
    """A field's value, parsed where it is a column of JSON."""
    return (parse_json(value.encode()) if value else None) if isinstance(value, str) else value


def _with_text_tags(
    turns: Turns,
    given: Mapping[str, int],
    inline: Collection[int],
    in_text: Collection[int],
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
    surplus = {kind: tags.count(kind) - n for kind, n in given.items()}
    for k in inline:
        surplus[tags[k]] -= 1
    number, out, left = len(tags), [], []
    for role, text in reversed(turns):
        for found in reversed([*tag.finditer(text)]):
            number -= 1
            may_be_text = (role == "gpt" or number in in_text) and number not in inline
            if may_be_text and surplus[found[1]] > 0:
                surplus[found[1]] -= 1
                plain = as_text(found[0], found.groups())
                text = text[: found.start()] + plain + text[found.end() :]
            else:
                left.append(number)
        out.append((role, text))
    return tuple(reversed(out)), left[::-1]


def _conversation(raw: Any) -> Turns:
    turns = []
    for turn in raw:
        if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
            raise ValueError("a turn is not {from, value} of text")
        if turn.get("from") not in list(ROLES):  # which may be asked for what has no hash
            raise ValueError(f"a turn is from {turn.get('from')!r:.50}, not human, gpt or system")
        turns.append((turn["from"], turn["value"]))
    return tuple(turns)


def _listed(fields: Mapping[str, Any], kind: str) -> list[Any]:
    """The media of a kind that stand beside the text, in one field or in numbered ones."""
    value = fields.get(kind)
    if isinstance(value, list):
        return value
    single = (fields.get(f"{kind}_{n}") for n in range(1, MOST_NUMBERED + 1))
    return [v for v in (value, *single) if v not in (None, "")]


def _found(kind: str, value: Any, number: int, find: Callable[[str], Path | Blob]) -> MediaFile:
    """A medium by its path, or by its bytes, which go before a path."""
    path: Any = None
    if isinstance(value, dict):
        path = value.get("path")
        value = path if value.get("bytes") is None else value["bytes"]
    if isinstance(value, bytes):
        return Embedded(value, path if isinstance(path, str) and path else f"{kind} {number}")
    if not isinstance(value, str) or not value:
        raise ValueError(f"{kind!r} is not a path or bytes, or a list of them")
    return find(value)
