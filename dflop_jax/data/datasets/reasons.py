"""Why records are unusable: what several have in common, and what to do about it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable

from dflop_jax.data.datasets.llava_records import TEXTS

REMEDIES = {
    "missing file": "missing files are looked for in the folder of the JSON file, or in those of "
    "--data.root; name theirs if it is another",
    f"no {', '.join(TEXTS)}": "fields of other names are said by --data.columns, such as "
    "messages=chat,image=pictures",
    "no column": "--data.columns FIELD=COLUMN names a column that is not there; mend it",
}
_FILE = re.compile(r"(?:\w+://|\.{0,2}/)?[^\s:'\"(]*/[^\s:'\"(]+")
_DETAIL, _NUMBER = re.compile(r"\s*\(.*$"), re.compile(r"\d+")


def reason_of(why: str, place: str) -> str:
    """What is wrong with the record at a place, without what is its own: name, files, numbers,
    details."""
    text = why.removeprefix(place)
    if text.startswith(" id="):
        text = text.partition(": ")[2] or text
    text = _FILE.sub("FILE", text.removeprefix(": "))
    text = _NUMBER.sub("N", _DETAIL.sub("", text.removeprefix("FILE: ")))
    return text.strip().removesuffix(" FILE")[:100] or "unreadable"


def by_reason(bad: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return why records are unusable, given as (place, why), by what they have in common, the most
    frequent first."""
    found = defaultdict(list)
    for place, why in bad:
        found[reason_of(why, place)].append(why)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def remedy_of(whys: Collection[str]) -> str:
    """What may be done about missing files or columns, "" where none are."""
    said = (remedy for sign, remedy in REMEDIES.items() if any(sign in why for why in whys))
    return "; ".join(said)
