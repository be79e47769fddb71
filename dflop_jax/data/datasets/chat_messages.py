"""Chat messages (roles with text or a list of typed parts) as turns of text with tags."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from dflop_jax.data.bounds import MAX_TURNS
from dflop_jax.data.text.pieces import ROLES
from dflop_jax.data.text.weighting import SWITCHES, WEIGHT

SPEAKERS = {name: role for role, name in ROLES.items()} | {role: role for role in ROLES}
Turns = tuple[tuple[str, str], ...]
OWN = {"role", "content", WEIGHT, *SWITCHES}  # fields of a message that are not the template's


def turns_of_messages(
    raw: Any, kinds: tuple[str, ...]
) -> tuple[Turns, dict[int, Any], frozenset[int], set[str]]:
    """Return (role, text) turns, where a tag stands for each medium, the media that parts name
    themselves (a path, bytes, or {"bytes", "path"}), by the number of their tag among all tags, the
    numbers of those that stand in typed parts of text, and keys of parts that are not read.

    A part is {"type": "text", "text": ...} or {"type": KIND} with the medium under its kind, "path"
    or "url"; without one, it is the next of the record's own field. ValueError: it is neither.
    """
    if not isinstance(raw, list) or not raw:
        raise ValueError("no messages")
    if len(raw) > MAX_TURNS:
        raise ValueError(f"more than {MAX_TURNS} turns in one record")
    turns: list[tuple[str, str]] = []
    media: dict[int, Any] = {}
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
            unread |= others
            if medium is not None:
                media[n_tags] = medium
            n = _tags(text, kinds)
            if isinstance(part, dict) and part.get("type") == "text":
                in_text.update(range(n_tags, n_tags + n))
            n_tags += n
            texts.append(text)
        whole = "".join(texts)
        if _tags(whole, kinds) != sum(_tags(text, kinds) for text in texts):
            raise ValueError(f"message {k} spells a tag across its parts")
        turns.append((SPEAKERS[role], whole))
    return tuple(turns), media, frozenset(in_text), unread


def _tags(text: str, kinds: tuple[str, ...]) -> int:
    return sum(text.count(f"<{kind}>") for kind in kinds)


def _part(part: Any, kinds: tuple[str, ...], message: int) -> tuple[str, Any, set[str]]:
    """A part's text or tag, its own medium if it names one, and its keys that are not read."""
    if isinstance(part, str):
        return part, None, set()
    kind = part.get("type") if isinstance(part, dict) else None
    given = {key for key, value in part.items() if value is not None} if kind else set()
    if kind == "text" and isinstance(part.get("text"), str):
        return part["text"], None, given - {"type", "text"}
    kind = kind.removesuffix("_url") if isinstance(kind, str) else kind
    if kind not in kinds:
        raise ValueError(
            f"message {message} has a part {part!r:.80}, not a text, {', '.join(kinds)}"
        )
    keys = (kind, f"{kind}_url", "path", "url")
    unread = given - {"type", "text", *keys}
    for key in keys:
        if value := _named(part.get(key)):
            return f"<{kind}>", value, unread
    return f"<{kind}>", None, unread


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
