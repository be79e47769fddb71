"""The folders that media may lie in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class NoFile(Exception):
    """There is a file at none of these paths."""


class Roots:
    """Folders that are looked through in turn. Nothing is found that lies outside them all, whether
    its path is absolute, climbs, or leads through a link."""

    def __init__(self, folders: Sequence[str | Path]) -> None:
        self._roots = [Path(r) for r in folders]
        self._real_roots = [r.resolve() for r in self._roots]

    def find(self, name: str) -> Path:
        """Return the file of that name. ValueError: it is missing (the cause is a
        `NoFile`), or leads out."""
        places = [root / name for root in self._roots]
        inside = [p for p in places if any(p.resolve().is_relative_to(r) for r in self._real_roots)]
        if not inside:
            roots = ", ".join(map(str, self._roots))
            raise ValueError(
                f"{name} leads out of {roots}; to allow it, add its folder to data.root"
            )
        for place in inside:
            if place.is_file():
                return place
        raise ValueError(f"missing file {inside[0]}") from NoFile(*map(str, inside))
