"""Chat messages (roles with text or a list of typed parts) as turns of text with tags."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from dflop_jax.data.text.tokenize import ROLES, SWITCHES, WEIGHT

SPEAKERS = {name: role for role, name in ROLES.items()} | {role: role for role in ROLES}
Turns = tuple[tuple[str, str], ...]
OWN = {"role", "content", WEIGHT, *SWITCHES}  # fields of a message that are not the template's


class Talk(NamedTuple):
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
    in_text: frozenset[int] = frozenset()
    unread: frozenset[str] = frozenset()


def turns_of_messages(raw: Any, kinds: tuple[str, ...]) -> Talk:
    """Return the turns of messages.

    A part is {"type": "text", "text": ...} or {"type": KIND} with the medium under its kind, "path"
    or "url"; without one, it is the next of the record's own field. ValueError: it is neither.
    """
    turns: list[tuple[str, str]] = []
    media: dict[int, Any] = {}
    keys: dict[int, Mapping[str, Any]] = {}
    in_text: set[int] = set()
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
        for part in [content] if isinstance(content, str) else content:
            text, medium, others = _part(part, kinds, k)
            n = _tags(text, kinds)
            if isinstance(part, dict) and part.get("type") == "text":
                in_text.update(range(n_tags, n_tags + n))
                unread |= others.keys()
            elif others:
                keys[n_tags] = others
            if medium is not None:
                media[n_tags] = medium
            n_tags += n
            texts.append(text)
        whole = "".join(texts)
        if _tags(whole, kinds) != sum(_tags(text, kinds) for text in texts):
            raise ValueError(f"message {k} spells a tag across its parts")
        turns.append((SPEAKERS[role], whole))
    return Talk(tuple(turns), media, keys, frozenset(in_text), frozenset(unread))


def _tags(text: str, kinds: tuple[str, ...]) -> int:
    return sum(text.count(f"<{kind}>") for kind in kinds)


def _part(part: Any, kinds: tuple[str, ...], message: int) -> tuple[str, Any, dict[str, Any]]:
    """A part's text or tag, its own medium if it names one, and what else it says."""
    if isinstance(part, str):
        return part, None, {}
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return part["text"], None, without(part, "type", "text")
    kind = kind.removesuffix("_url") if isinstance(kind, str) else kind
    if kind not in kinds:
        raise ValueError(
            f"message {message} has a part {part!r:.80}, not a text, {', '.join(kinds)}"
        )
    keys = (kind, f"{kind}_url", "path", "url")
    others = without(part, "type", "text", *keys)
    return f"<{kind}>", next(filter(None, (_named(part.get(key)) for key in keys)), None), others


def without(given: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """What is given under other keys; tables have None for what is missing."""
    return {key: v for key, v in given.items() if key not in keys and v is not None}


def _named(value: Any) -> Any:
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
