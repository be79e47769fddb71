"""Conversations of records as (role, text) turns with a tag for each medium.

A record has LLaVA's "conversations" of {from, value}, or "messages" (roles with text or a list of
typed parts).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Collection, Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

from dflop_jax.data.bounds import MAX_TURNS, parse_json
from dflop_jax.data.media.kind import Kinds, tag_of
from dflop_jax.data.text.tokenize import (
    BREAK,
    LOSS_SWITCHES,
    ROLES,
    WEIGHT_FIELD,
    TemplateFields,
    answer_weights,
    escape_tags,
)

CONVERSATION_FIELDS = ("conversations", "messages")
SYSTEM_FIELD = "system"  # of a record whose conversation has no system turn
OPTIONS_FIELD = "chat_template_kwargs"  # further variables of the template
VARIABLE_FIELDS = ("tools", "documents", "enable_thinking")
# The roles that may speak before a role; "" at the beginning.
PREVIOUS_ROLES = {"human": ("", "gpt"), "gpt": ("human", "tool"), "tool": ("gpt", "tool")}
SPEAKERS = {name: role for role, name in ROLES.items()} | {role: role for role in ROLES}
# Fields of a message that are not passed on to the template.
MESSAGE_FIELDS = {"role", "content", WEIGHT_FIELD, *LOSS_SWITCHES}
Turns = tuple[tuple[str, str], ...]


class Conversation(NamedTuple):
    """(role, text) turns, where a tag stands for each medium.

    Attributes:
      media: media that parts name themselves (a path, bytes, or {"bytes", "path"}), by the number
        of their tag among all tags.
      keys: the other fields of those parts, by the same number.
      tags_in_text: numbers of the tags in typed parts of text.
      unread: keys of such parts that are not read.
    """

    turns: Turns
    media: Mapping[int, Any] = MappingProxyType({})
    keys: Mapping[int, Mapping[str, Any]] = MappingProxyType({})
    tags_in_text: frozenset[int] = frozenset()
    unread: frozenset[str] = frozenset()


def parse_messages(raw: Any, kinds: tuple[str, ...]) -> Conversation:
    """Return the conversation of messages.

    A part is {"type": "text", "text": ...} or {"type": KIND} with the medium under its kind, "path"
    or "url"; without a medium it stands for the next one of the record's own field.

    Raises:
      ValueError: a message or part of another form.
    """
    turns: list[tuple[str, str]] = []
    media: dict[int, Any] = {}
    keys: dict[int, Mapping[str, Any]] = {}
    tags_in_text: set[int] = set()
    unread: set[str] = set()
    n_tags = 0
    for k, message in enumerate(raw):
        if not isinstance(message, dict):
            raise ValueError(f"message {k} is not {{role, content}}")
        role = message.get("role")
        if not isinstance(role, str) or role not in SPEAKERS:
            raise ValueError(f"message {k} is from {role!r:.50}, not user, assistant or system")
        content = message.get("content")
        if not content and message.get("tool_calls"):
            content = ""  # an answer may be calls alone
        elif not content or not isinstance(content, str | list):
            raise ValueError(f"message {k} (of {role}) has no content")
        texts = []
        for content_part in [content] if isinstance(content, str) else content:
            text, medium, extra_keys = _parse_content_part(content_part, kinds, k)
            n_part_tags = _count_tags(text, kinds)
            if isinstance(content_part, dict) and content_part.get("type") == "text":
                tags_in_text.update(range(n_tags, n_tags + n_part_tags))
                unread |= extra_keys.keys()
            elif extra_keys:
                keys[n_tags] = extra_keys
            if medium is not None:
                media[n_tags] = medium
            n_tags += n_part_tags
            texts.append(text)
        message_text = "".join(texts)
        if _count_tags(message_text, kinds) != sum(_count_tags(text, kinds) for text in texts):
            raise ValueError(f"message {k} spells a tag across its parts")
        turns.append((SPEAKERS[role], message_text))
    return Conversation(tuple(turns), media, keys, frozenset(tags_in_text), frozenset(unread))


def _count_tags(text: str, kinds: tuple[str, ...]) -> int:
    return sum(text.count(f"<{kind}>") for kind in kinds)


def _parse_content_part(
    content_part: Any, kinds: tuple[str, ...], message: int
) -> tuple[str, Any, dict[str, Any]]:
    """Return (text or tag, own medium or None, extra keys) of a part."""
    if isinstance(content_part, str):
        return content_part, None, {}
    kind = content_part.get("type") if isinstance(content_part, dict) else None
    if kind == "text" and isinstance(content_part.get("text"), str):
        return content_part["text"], None, drop_keys(content_part, "type", "text")
    kind = kind.removesuffix("_url") if isinstance(kind, str) else kind
    if kind not in kinds:
        raise ValueError(
            f"message {message} has a part {content_part!r:.80}, not a text, {', '.join(kinds)}"
        )
    keys = (kind, f"{kind}_url", "path", "url")
    extra_keys = drop_keys(content_part, "type", "text", *keys)
    return (
        f"<{kind}>",
        next(filter(None, (_medium_source(content_part.get(key)) for key in keys)), None),
        extra_keys,
    )


def drop_keys(values: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """Return the values under other keys; None values of tables are missing ones."""
    return {key: v for key, v in values.items() if key not in keys and v is not None}


def _medium_source(value: Any) -> Any:
    """Return the path or bytes that a part names; None where its fields are empty, as tables fill
    in missing ones."""
    if isinstance(value, Mapping) and value.get("url"):
        value = value["url"]
    if isinstance(value, Mapping):
        return value if value.get("bytes") or value.get("path") else None
    if not isinstance(value, str):
        return value or None
    if value.startswith(("http://", "https://")):
        raise ValueError(f"{value:.80} is not here; fetch it and name the file")
    if value.startswith("data:"):
        try:
            return base64.b64decode(value.partition(",")[2], validate=True)
        except binascii.Error as e:
            raise ValueError(f"{value:.40}... is not base64 ({e})") from None
    return value.removeprefix("file://")


def parse_turns(
    fields: Mapping[str, Any], kinds: Kinds, question: Turns
) -> tuple[Conversation, tuple[float, ...], TemplateFields]:
    """Return the conversation of a record, its answers' weights, and its template's fields.

    Args:
      question: the turns of a record that has a question instead; () for others.

    Raises:
      ValueError: no conversation, or roles, texts or weights that cannot be.
    """
    raw: Any = [{}] * len(question)
    if question:
        conversation = Conversation(question)
    else:
        field = next((name for name in CONVERSATION_FIELDS if fields.get(name)), "")
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
    if system := fields.get(SYSTEM_FIELD):
        if not isinstance(system, str):
            raise ValueError(f"its {SYSTEM_FIELD} is {system!r:.50}, not text")
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
    if roles[-1] != "gpt" or any(a not in PREVIOUS_ROLES.get(b, ()) for a, b in steps):
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
    """Return the fields of a turn that are passed on to the template."""
    own_fields = MESSAGE_FIELDS if "role" in turn else MESSAGE_FIELDS | {"from", "value"}
    return {name: v for name, v in turn.items() if name not in own_fields and v is not None}


def _template_variables(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables that a record gives its template.

    Raises:
      ValueError: they are no object, or two fields give one.
    """
    record_variables = {name: _parse_json_column(fields.get(name)) for name in VARIABLE_FIELDS}
    variables = {name: value for name, value in record_variables.items() if value is not None}
    options = _parse_json_column(fields.get(OPTIONS_FIELD))
    options = {} if options is None else options
    if not isinstance(options, dict) or options.keys() & {*variables, "messages"}:
        raise ValueError(f"its {OPTIONS_FIELD} are no object, or repeat a field of the record")
    return variables | {name: value for name, value in options.items() if value is not None}


def _parse_json_column(value: Any) -> Any:
    """A field's value, parsed where it is a column of JSON."""
    return (parse_json(value.encode()) if value else None) if isinstance(value, str) else value


def escape_text_tags(
    turns: Turns,
    n_media: Mapping[str, int],
    inline: Collection[int],
    tags_in_text: Collection[int],
    kinds: Kinds,
) -> tuple[Turns, list[int]]:
    """Return the turns with surplus tags as plain text, and the numbers of the other tags.

    Only tags of answers and of typed parts of text may be text; surplus ones are escaped from the
    last one on.

    Args:
      n_media: media by kind that the record names beside its text.
      inline: numbers of the tags whose media the text itself names.
      tags_in_text: numbers of the tags in typed parts of text.
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


def find_tags(turns: Turns, kinds: Kinds) -> list[str]:
    """Return the kind of each medium's tag in the turns, in order."""
    return [kind for _, text in turns for kind in tag_of(kinds).findall(text)]
