"""What processors write around a picture's place once a chat template has been rendered (Gemma)."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Span = tuple[int, int]


@dataclass(frozen=True)
class PictureFrame:
    """A template's text for a picture, and what is put in its place; both may be ""."""

    written: str = ""
    framed: str = ""

    @classmethod
    def of(cls, named: Mapping[str, str], template: str) -> PictureFrame:
        """Return that of a tokenizer whose configuration names the tokens that begin and end a
        picture: Gemma 3's templates write the former alone, Gemma 4's the picture's own token."""
        begin, picture, end = (named.get(f"{name}_token") for name in ("boi", "image", "eoi"))
        if not (begin and picture and end):
            return cls()
        if picture in template:
            return cls(picture, f"{begin}{picture}{end}")
        return cls(begin, f"\n\n{begin}{picture}{end}\n\n")

    def around(self, text: str, spans: Sequence[Span]) -> tuple[str, tuple[Span, ...]]:
        """A rendered text with its pictures framed, and the places of its spans there."""
        if not self.written:
            return text, tuple(spans)
        starts = [found.start() for found in re.finditer(re.escape(self.written), text)]
        longer = len(self.framed) - len(self.written)

        def moved(place: int) -> int:
            return place + longer * bisect_left(starts, place)

        framed = text.replace(self.written, self.framed)
        return framed, tuple((moved(begin), moved(end)) for begin, end in spans)
