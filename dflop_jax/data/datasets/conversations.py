"""Conversations of records as (role, text) turns with a tag for each medium: LLaVA's
"conversations" of {from, value}, or "messages" (roles with text or a list of typed parts)."""

from __future__ import annotations

import ast
import base64
import binascii
import re
import string
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

from dflop_jax.data.bounds import MAX_PARTS, parse_json
from dflop_jax.data.media.kind import Kinds, tag_of
from dflop_jax.data.text import tokenize
from dflop_jax.data.text.tokenize import ROLES, TemplateFields

CONVERSATION_FIELDS = ("conversations", "messages")
SYSTEM_FIELD = "system"  # system prompt of a record without a system turn
OPTIONS_FIELD = "chat_template_kwargs"  # other variables of the template
VARIABLE_FIELDS = ("tools", "documents", "enable_thinking")
TEMPLATE_FIELDS = (SYSTEM_FIELD, OPTIONS_FIELD, *VARIABLE_FIELDS)
# The roles that may precede a role; "": the beginning.
PREVIOUS_ROLES = {"human": ("", "gpt"), "gpt": ("human", "tool"), "tool": ("gpt", "tool")}
SPEAKERS = {name: role for role, name in ROLES.items()} | {role: role for role in ROLES}
# Fields of a message or turn that are not passed on to the template.
MESSAGE_FIELDS = {"role", "content", tokenize.WEIGHT_FIELD, *tokenize.LOSS_SWITCHES}
TURN_FIELDS = MESSAGE_FIELDS | {"from", "value"}
QUESTION, ANSWERS, CHOICES = "question", "answers", "choices"
TEXT_FIELDS = (*CONVERSATION_FIELDS, QUESTION)
# Fields of questions, and their names in public datasets.
SPELLINGS = {
    QUESTION: (QUESTION, "query", "prompt"),
    ANSWERS: (ANSWERS, "answer", "label", "completion", "response"),
    CHOICES: (CHOICES, "options"),
}
MAX_NUMBERED_MEDIA = 9  # media in numbered columns: image_1, image_2, ...
LETTERS = string.ascii_uppercase
BY_LETTER = "Answer with the letter of the right choice."
_NUMBERED_TAG = re.compile(r"<(\w+)[ _](\d+)>")
Turns = tuple[tuple[str, str], ...]


class Tag(NamedTuple):
    """A tag in a text that marks the position of a medium of a kind."""

    kind: str
    may_be_text: bool  # it is in an answer or a text part, and may mark no medium
    medium: Any = None  # the medium of its part (a path, bytes, or {"bytes", "path"})
    keys: Mapping[str, Any] = MappingProxyType({})  # other fields of its part


class Conversation(NamedTuple):
    turns: Turns
    tags: Sequence[Tag]  # in the order of the turns
    weights: tuple[float, ...] = ()  # loss weight of each answer; () if all are 1
    template_fields: TemplateFields = tokenize.NO_FIELDS
    unread: frozenset[str] = frozenset()  # keys of text parts that are not read


def parse_conversation(
    fields: Mapping[str, Any], kinds: Kinds, question: Turns = ()
) -> Conversation:
    """Return the conversation of a record, or of `question`, the turns of its question."""
    turns, unread = question, frozenset[str]()
    raw: Any = [{}] * len(question)
    tags: list[Tag] | None = None
    if not question:
        field = next((name for name in CONVERSATION_FIELDS if fields.get(name)), "")
        raw = _parse_json_column(fields.get(field))
        by_column = isinstance(raw, dict) and all(isinstance(v, list) for v in raw.values())
        if by_column and field != "messages":
            raw = [dict(zip(raw, values)) for values in zip(*raw.values())]
        if not isinstance(raw, list) or not raw:
            raise ValueError("no conversations or messages")
        if len(raw) > MAX_PARTS:
            raise ValueError(f"more than {MAX_PARTS} turns in one record")
        if field == "messages":
            turns, tags, unread = _parse_messages(raw, kinds)
        else:
            turns = _parse_llava_turns(raw)
    if tags is None:
        tags = [Tag(k, role == "gpt") for role, text in turns for k in tag_of(kinds).findall(text)]
    if any(tokenize.BREAK in text for _, text in turns):
        raise ValueError("text contains U+FDD2, which is not a character")
    if system := fields.get(SYSTEM_FIELD):
        if not isinstance(system, str):
            raise ValueError(f"its {SYSTEM_FIELD} is {system!r:.50}, not text")
        if turns[0][0] == "system":
            raise ValueError("it has a system field and a system turn; leave one out")
        plain = tokenize.escape_tags(system, (kind.name for kind in kinds))
        turns, raw = (("system", plain), *turns), [{}, *raw]
    _check_roles([role for role, _ in turns])
    own_fields = [MESSAGE_FIELDS if "role" in turn else TURN_FIELDS for turn in raw]
    messages = tuple(drop_keys_and_none(turn, *excluded) for turn, excluded in zip(raw, own_fields))
    for (role, text), message in zip(turns, messages, strict=True):
        is_empty = not tag_of(kinds).sub("", text).strip()
        if role == "gpt" and is_empty and not message.get("tool_calls"):
            raise ValueError("an answer is empty")
    roles = [role for role, _ in turns]
    weights = tokenize.answer_weights(raw, roles, fields.get(tokenize.WEIGHT_FIELD))
    template_fields = TemplateFields(messages if any(messages) else (), _template_variables(fields))
    return Conversation(turns, tags, weights, template_fields, unread)


def _parse_messages(raw: Sequence[Any], kinds: Kinds) -> tuple[Turns, list[Tag], frozenset[str]]:
    """Return the turns, tags and unread keys of messages. ValueError: a malformed message.

    A part is {"type": "text", "text": ...} or {"type": KIND} with the medium under its kind, "path"
    or "url"; a part without a medium takes the next one of the record's media field.
    """
    turns: list[tuple[str, str]] = []
    tags: list[Tag] = []
    unread: set[str] = set()
    for k, message in enumerate(raw):
        if not isinstance(message, dict):
            raise ValueError(f"message {k} is not {{role, content}}")
        role = message.get("role")
        if not isinstance(role, str) or role not in SPEAKERS:
            raise ValueError(f"message {k} is from {role!r:.50}, not user, assistant or system")
        content = message.get("content")
        if not content and message.get("tool_calls"):
            content = ""  # an answer may have only tool calls
        elif not content or not isinstance(content, str | list):
            raise ValueError(f"message {k} (of {role}) has no content")
        message_text, n_before = "", len(tags)
        for content_part in [content] if isinstance(content, str) else content:
            text, medium, keys = _parse_part(content_part, tuple(kind.name for kind in kinds), k)
            if is_typed_text := isinstance(content_part, dict) and content_part["type"] == "text":
                unread |= keys.keys()
                keys = {}
            may_be_text = is_typed_text or SPEAKERS[role] == "gpt"
            for kind in tag_of(kinds).findall(text):
                tags.append(Tag(kind, may_be_text, medium, keys))
            message_text += text
        if len(tag_of(kinds).findall(message_text)) != len(tags) - n_before:
            raise ValueError(f"message {k} spells a tag across its parts")
        turns.append((SPEAKERS[role], message_text))
    return tuple(turns), tags, frozenset(unread)


def _parse_part(
    content_part: Any, kinds: tuple[str, ...], message: int
) -> tuple[str, Any, dict[str, Any]]:
    """Return (text or tag, medium or None, other keys) of a part of a message."""
    if isinstance(content_part, str):
        return content_part, None, {}
    kind = content_part.get("type") if isinstance(content_part, dict) else None
    if kind == "text" and isinstance(content_part.get("text"), str):
        return content_part["text"], None, drop_keys_and_none(content_part, "type", "text")
    kind = kind.removesuffix("_url") if isinstance(kind, str) else kind
    if kind not in kinds:
        raise ValueError(
            f"message {message} has a part {content_part!r:.80}, not a text, {', '.join(kinds)}"
        )
    keys = (kind, f"{kind}_url", "path", "url")
    medium = next(filter(None, (_medium_source(content_part.get(key)) for key in keys)), None)
    return f"<{kind}>", medium, drop_keys_and_none(content_part, "type", "text", *keys)


def drop_keys_and_none(values: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """Return a copy without `keys` and without None values (missing ones, in tables)."""
    return {key: v for key, v in values.items() if key not in keys and v is not None}


def _medium_source(value: Any) -> Any:
    """Return a part's path or bytes; None if its fields are empty, as in tables."""
    if isinstance(value, Mapping) and value.get("url"):
        value = value["url"]
    if isinstance(value, Mapping):
        return value if value.get("bytes") or value.get("path") else None
    if not isinstance(value, str):
        return value or None
    if value.startswith(("http://", "https://")):
        raise ValueError(f"{value:.80} is a web address; download it and name the file")
    if value.startswith("data:"):
        try:
            return base64.b64decode(value.partition(",")[2], validate=True)
        except binascii.Error as e:
            raise ValueError(f"{value:.40}... is not base64 ({e})") from None
    return value.removeprefix("file://")


def _parse_llava_turns(raw: Sequence[Any]) -> Turns:
    turns = []
    for turn in raw:
        if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
            raise ValueError("a turn is not {from, value} of text")
        if turn.get("from") not in list(ROLES):  # a list, as the value may be unhashable
            raise ValueError(f"a turn is from {turn.get('from')!r:.50}, not human, gpt or system")
        turns.append((turn["from"], turn["value"]))
    return tuple(turns)


def _check_roles(roles: Sequence[str]) -> None:
    spoken_roles = roles[roles[0] == "system" :]
    if not spoken_roles or spoken_roles[0] != "human":
        first = spoken_roles[0] if spoken_roles else "system only"
        raise ValueError(f"the first turn is by {first}, not human")
    steps = pairwise(["", *spoken_roles])
    if roles[-1] != "gpt" or any(a not in PREVIOUS_ROLES.get(b, ()) for a, b in steps):
        raise ValueError("turns do not alternate human, gpt up to an answer")


def _template_variables(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables that a record passes to its chat template."""
    variables = {name: _parse_json_column(fields.get(name)) for name in VARIABLE_FIELDS}
    variables = drop_keys_and_none(variables)
    options = _parse_json_column(fields.get(OPTIONS_FIELD))
    options = {} if options is None else options
    if not isinstance(options, dict) or options.keys() & {*variables, "messages"}:
        raise ValueError(f"its {OPTIONS_FIELD} is not an object, or repeats a field of the record")
    return variables | drop_keys_and_none(options)


def _parse_json_column(value: Any) -> Any:
    """Return a field's value, parsed as JSON if it is text."""
    return (parse_json(value.encode()) if value else None) if isinstance(value, str) else value


def parse_question(
    fields: Mapping[str, Any], media: Mapping[str, list[Any]]
) -> tuple[Turns, dict[str, list[Any]]]:
    """Return the question of a record and its first answer as turns, and the media by kind in the
    order of their tags. Media without a tag come first. If there are choices, the answer is a
    letter. ValueError: no text, or unusable answers or choices."""
    text = fields.get(QUESTION)
    if isinstance(text, Mapping):  # by language, as in DocVQA
        text = text.get("en")
    if not isinstance(text, str) or not text.strip():
        raise ValueError("its question is not text")
    choices = _parse_choices(fields.get(CHOICES))
    answer = _parse_answer(fields.get(ANSWERS), choices)
    if choices:
        listed = (f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False))
        text = "\n".join([text, *listed, BY_LETTER])
    text, ordered = _place_tags(text, media)
    return (("human", text), ("gpt", answer)), ordered


def _place_tags(text: str, media: Mapping[str, list[Any]]) -> tuple[str, dict[str, list[Any]]]:
    """Return the text with plain instead of numbered tags, and the media in the order of tags."""
    numbers: dict[str, list[int]] = {kind: [] for kind in media}

    def replace_tag(tag: re.Match[str]) -> str:
        kind, number = tag[1], int(tag[2])
        if kind not in media:
            return tag[0]
        if not 1 <= number <= len(media[kind]):
            raise ValueError(f"its question names {tag[0]}, but there are {len(media[kind])}")
        numbers[kind].append(number)
        return f"<{kind}>"

    text = _NUMBERED_TAG.sub(replace_tag, text)
    if not any(numbers.values()) and any(f"<{kind}>" in text for kind in media):
        return text, {**media}
    ordered_media, leading_tags = {}, ""
    for kind, values in media.items():
        unnamed = [m for n, m in enumerate(values, 1) if n not in numbers[kind]]
        leading_tags += f"<{kind}>" * len(unnamed)
        ordered_media[kind] = unnamed + [values[n - 1] for n in numbers[kind]]
    return (f"{leading_tags}\n{text}" if leading_tags else text), ordered_media


def _parse_choices(raw: Any) -> tuple[str, ...]:
    if raw in (None, "", []):
        return ()
    if isinstance(raw, str):  # MMMU writes a Python list
        try:
            raw = ast.literal_eval(raw)
        except (ValueError, SyntaxError):
            raise ValueError("its choices are not a list") from None
    if not isinstance(raw, list | tuple) or len(raw) > len(LETTERS):
        raise ValueError(f"its choices are not a list of at most {len(LETTERS)}")
    return tuple(str(choice) for choice in raw)


def _parse_answer(raw: Any, choices: Sequence[str]) -> str:
    """Return the first answer with text, or "" if none has; a letter if there are choices."""
    for value in raw if isinstance(raw, list) else [] if raw is None else [raw]:
        value = value.get("answer") if isinstance(value, Mapping) else value
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError(f"an answer is {value!r:.50}, not text")
        if str(value).strip():
            return _choice_letter(value, choices) if choices else str(value)
    return ""


def _choice_letter(value: str | float, choices: Sequence[str]) -> str:
    """Return the letter of a choice, given its number from 0, its letter or its text."""
    letters = LETTERS[: len(choices)]
    if isinstance(value, int) and 0 <= value < len(choices):
        return letters[value]
    text = str(value).strip()
    if text in [*letters]:
        return text
    if text in choices:
        return letters[[*choices].index(text)]
    raise ValueError(f"its answer {text!r:.50} is none of its {len(choices)} choices")
