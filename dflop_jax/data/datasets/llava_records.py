"""LLaVA-format records: what makes one usable, how it is called, and which are held out."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflop_jax.data.bounds import MAX_ID, MAX_MEDIA, MAX_TURNS
from dflop_jax.data.datasets.blob import Blob
from dflop_jax.data.text.pieces import ROLES

KINDS = ("image", "video", "audio")
MEDIUM = re.compile(f"<({'|'.join(KINDS)})>")


@dataclass(frozen=True)
class Record:
    """One conversation. `media` are (kind, path) in the order of their tags in the turns."""

    name: str
    turns: tuple[tuple[str, str], ...]
    media: tuple[tuple[str, Path | Blob], ...]


def parse_record(place: str, raw: Any, find: Callable[[str], Path | Blob]) -> Record:
    """Return a usable record; `find` finds a medium by the name that it has there.

    Raises:
      ValueError: the reason why it is unusable, with its name (see `record_name`).
    """
    name = record_name(place, raw)
    try:
        if not isinstance(raw, dict):
            raise ValueError("not a JSON object")
        turns = _turns(raw.get("conversations"))
        names = {kind: _paths(raw, kind) for kind in KINDS}
        if sum(map(len, names.values())) > MAX_MEDIA:
            raise ValueError(f"more than {MAX_MEDIA} media in one record")
        tags = [t for _, text in turns for t in MEDIUM.findall(text)]
        if names["video"] and not names["image"] and "video" not in tags:
            # as LLaVA-NeXT writes videos
            tags = ["video" if t == "image" else t for t in tags]
            turns = tuple((role, text.replace("<image>", "<video>")) for role, text in turns)
        for kind, paths in names.items():
            if tags.count(kind) != len(paths):
                raise ValueError(f"{tags.count(kind)} <{kind}> tags for {len(paths)} {kind}s")
        queues = {kind: iter(paths) for kind, paths in names.items()}
        return Record(name, turns, tuple((tag, find(next(queues[tag]))) for tag in tags))
    except (ValueError, OSError) as e:
        raise ValueError(f"{name}: {e}") from None


def record_name(place: str, raw: Any) -> str:
    """Return its place (FILE:LINE or FILE[INDEX]), and the record's id if it has one."""
    found = raw.get("id") if isinstance(raw, dict) else None
    if not isinstance(found, str | int | float) or found == "":
        return place
    return f"{place} id={str(found)[:MAX_ID]}"


def lot(name: str, place: str) -> int:
    """Return the number below 2**64 that a record draws by its id, or else by its place."""
    key = name.removeprefix(place).removeprefix(" id=") or place
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big")


def check_split(split: str, eval_fraction: float) -> None:
    """ValueError for an unknown split, or one without its share."""
    if split not in ("train", "eval"):
        raise ValueError(f"split {split!r} is not train or eval")
    if not 0 <= eval_fraction < 1:
        raise ValueError(f"eval_fraction={eval_fraction} is not in [0, 1)")
    if split == "eval" and eval_fraction == 0:
        raise ValueError("the eval split of a dataset on disk needs eval_fraction > 0, e.g. 0.1")


def _turns(raw: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(raw, list) or not raw:
        raise ValueError("no conversations")
    if len(raw) > MAX_TURNS:
        raise ValueError(f"more than {MAX_TURNS} turns in one record")
    turns = []
    for turn in raw:
        if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
            raise ValueError("a turn is not {from, value} of text")
        if turn.get("from") not in list(ROLES):  # which may be asked for what has no hash
            raise ValueError(f"a turn is from {turn.get('from')!r:.50}, not human, gpt or system")
        turns.append((turn["from"], turn["value"]))
    talk = turns[1:] if turns[0][0] == "system" else turns
    if not talk or talk[0][0] != "human":
        raise ValueError(f"the first turn is by {talk[0][0] if talk else 'system only'}, not human")
    if len(talk) % 2 or any(role != ("human", "gpt")[k % 2] for k, (role, _) in enumerate(talk)):
        raise ValueError("turns do not alternate human, gpt up to an answer")
    if any(role == "gpt" and not MEDIUM.sub("", text).strip() for role, text in talk):
        raise ValueError("an answer is empty")
    return tuple(turns)


def _paths(raw: dict[str, Any], key: str) -> list[str]:
    value = raw.get(key)
    items = value if isinstance(value, list) else [] if value in (None, "") else [value]
    if not all(isinstance(p, str) and p for p in items):
        raise ValueError(f"{key!r} is not a path or a list of paths")
    return items
