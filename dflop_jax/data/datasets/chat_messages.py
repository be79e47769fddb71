"""Chat messages (roles with text or a list of typed parts) as turns of text with tags."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from dflop_jax.data.text.tokenize import LOSS_SWITCHES, ROLES, WEIGHT_FIELD

SPEAKERS = {name: role for role, name in ROLES.items()} | {role: role for role in ROLES}
Turns = tuple[tuple[str, str], ...]
MESSAGE_FIELDS = {
    "role",
    "content",
    WEIGHT_FIELD,
    *LOSS_SWITCHES,
}  # fields of a message that are not the template's


class Conversation(NamedTuple):
    """(role, text) turns, where a tag stands for each medium.

    Attributes:
      media: that parts name themselves (a path, bytes, or {"bytes", "path"}), by the number of
        their tag among all tags; keys: what else those parts say of them, by the same.
      in_text: numbers of the tags in typed parts of text.
      unread: keys of such parts that are not read.
    """

    turns: Turns
    media: Mapping[int, Any] = MappingProxyType({})
    keys: Mapping[int, Mapping[str, Any]] = MappingProxyType({})
    tags_in_text: frozenset[int] = frozenset()
    unread: frozenset[str] = frozenset()


def parse_messages(raw: Any, kinds: tuple[str, ...]) -> Conversation:
    """Return the turns of messages.

    A part is {"type": "text", "text": ...} or {"type": KIND} with the medium under its kind, "path"
    or "url"; without one, it is the next of the record's own field. ValueError: it is neither.
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
    """A part's text or tag, its own medium if it names one, and what else it says."""
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
    """What is given under other keys; tables have None for what is missing."""
    return {key: v for key, v in values.items() if key not in keys and v is not None}


def _medium_source(value: Any) -> Any:
    """What a part names; None where all that it has is empty, as tables fill in what is missing."""
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
