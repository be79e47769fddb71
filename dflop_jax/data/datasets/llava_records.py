"""LLaVA-format records: the file that lists them, and what makes one of them usable."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dflop_jax.data.datasets.blob import Blob
from dflop_jax.data.text.pieces import ROLES

MEDIUM = re.compile("<(image|video|audio)>")


class AudioRecord(Exception):
    """Not an error: the record is of a modality that is left out."""


@dataclass(frozen=True)
class Record:
    """One conversation. `media` are (kind, path) in the order of their tags in the turns."""

    name: str
    turns: tuple[tuple[str, str], ...]
    media: tuple[tuple[str, Path | Blob], ...]


def find_file(path: Path) -> Path:
    """The dataset file: the path itself, or dataset.json or the only .json(l) in a folder."""
    if path.is_dir():
        if (path / "dataset.json").is_file():
            return path / "dataset.json"
        found = sorted(p for p in path.iterdir() if p.suffix in (".json", ".jsonl"))
        if len(found) != 1:
            raise ValueError(
                f"{path}: holds no dataset.json and {len(found)} .json/.jsonl files; "
                "name the dataset file itself"
            )
        return found[0]
    if not path.is_file():
        raise ValueError(f"{path}: no such file or folder; data.path names a LLaVA-format JSON")
    return path


def read_file(file: Path) -> Iterator[tuple[str, Any]]:
    """(place, raw record or the ValueError of a broken JSONL line) of each entry of the file.

    Raises:
      ValueError: the file as a whole is not a JSON list (or, named .jsonl, has no lines).
    """
    data = file.read_bytes()
    if file.suffix == ".jsonl":
        lines = [(n, line) for n, line in enumerate(data.split(b"\n"), 1) if line.strip()]
        if not lines:
            raise ValueError(f"{file}: holds no records")
        for n, line in lines:
            try:
                yield f"{file.name}:{n}", msgspec.json.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as e:
                yield f"{file.name}:{n}", ValueError(f"not JSON ({e})")
        return
    try:
        raw = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise ValueError(
            f"{file}: not JSON ({e}); repair it, or name it .jsonl if each line is a record"
        ) from None
    if not isinstance(raw, list) or not raw:
        kind = "an empty list" if raw == [] else f"a {type(raw).__name__}"
        raise ValueError(f"{file}: holds {kind}, expected a JSON list of records")
    for k, item in enumerate(raw):
        yield f"{file.name}[{k}]", item


def parse_record(place: str, raw: Any, root: Path) -> Record:
    """A usable record. `place` (FILE:LINE or FILE[INDEX]) names it together with its id.

    Raises:
      AudioRecord: it has audio.
      ValueError: the reason why it is unusable, without its name (see `record_name`).
    """
    if isinstance(raw, dict) and raw.get("audio"):
        raise AudioRecord
    return parse_any(place, raw, lambda name: _in_folder(root, name), ("image", "video"))


def parse_any(
    place: str,
    raw: Any,
    find: Callable[[str], Path | Blob],
    kinds: tuple[str, ...] = ("image", "video", "audio"),
) -> Record:
    """A usable record of media of these kinds, each of which `find` finds by the name it has there.

    Raises:
      ValueError: the reason why it is unusable, without its name; also what `find` raises.
    """
    if isinstance(raw, ValueError):
        raise raw
    if not isinstance(raw, dict):
        raise ValueError("not a JSON object")
    turns = _turns(raw.get("conversations"))
    names = {kind: _paths(raw, kind) for kind in kinds}
    tags = [t for _, text in turns for t in MEDIUM.findall(text) if t in kinds]
    if names["video"] and not names["image"] and "video" not in tags:
        # as LLaVA-NeXT writes videos
        tags = ["video" if t == "image" else t for t in tags]
        turns = tuple((role, text.replace("<image>", "<video>")) for role, text in turns)
    for kind, found in names.items():
        if tags.count(kind) != len(found):
            raise ValueError(f"{tags.count(kind)} <{kind}> tags for {len(found)} {kind}s")
    queues = {kind: iter(found) for kind, found in names.items()}
    media = tuple((tag, find(next(queues[tag]))) for tag in tags)
    return Record(record_name(place, raw), turns, media)


def record_name(place: str, raw: Any) -> str:
    """FILE:LINE or FILE[INDEX], and the record's id if it has one."""
    found = raw.get("id") if isinstance(raw, dict) else None
    return f"{place} id={found}" if found not in (None, "") else place


def held_out(raw: Any, place: str, fraction: float) -> bool:
    """Whether a record belongs to the held-out share: fixed by its id, or else by its place."""
    return lot(record_name(place, raw), place) < fraction * 2**64


def lot(name: str, place: str) -> int:
    """The number below 2**64 that a record draws by its id, or else by its place."""
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


def _in_folder(root: Path, name: str) -> Path:
    if not (root / name).is_file():
        raise ValueError(f"missing file {root / name}")
    return root / name


def _turns(raw: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(raw, list) or not raw:
        raise ValueError("no conversations")
    turns = []
    for turn in raw:
        if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
            raise ValueError("a turn is not {from, value} of text")
        if turn.get("from") not in ROLES:
            raise ValueError(f"a turn is from {turn.get('from')!r}, not human, gpt or system")
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
