"""A LLaVA-format dataset on disk: records checked and headers read once, pixels when asked."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from dflop_jax.data.datasets.blob import Blob
from dflop_jax.data.datasets.layout import (
    Header,
    Layout,
    OversizeError,
    assemble,
    grey_tiles,
    lay_out,
)
from dflop_jax.data.datasets.llava_records import (
    AudioRecord,
    Record,
    check_split,
    find_file,
    held_out,
    parse_record,
    read_file,
    record_name,
)
from dflop_jax.data.media.tiling import picture_size, read_picture
from dflop_jax.data.media.video import count_frames, read_clip
from dflop_jax.data.sample import Limits, MediaSpec, Sample
from dflop_jax.data.text.pieces import Tokenizer, chat_pieces
from dflop_jax.records import SampleShape

logger = logging.getLogger("dflop_jax.data")


class LlavaSource:
    """The usable records of a LLaVA-format JSON or JSONL file (or its folder).

    Making one reads the file and, in `workers` threads, the header of every medium, so that all
    shapes are known. Unusable records (missing or broken media, tags unlike the media, no answer)
    are logged by name and left out, as are audio records and, by `limits.oversize`, long ones;
    `counts` says how many of each. Media paths are relative to `root`, else the file's folder.

    Args:
      split: "train", or "eval" for the share `eval_fraction` of records (chosen by a hash of their
        id) that "train" then leaves out.

    Raises:
      ValueError: an unreadable file, nothing usable, more than `max_bad_fraction` of the records
        unusable, or an oversize record under oversize="error".
    """

    def __init__(
        self,
        path: str | Path,
        spec: MediaSpec,
        tokenizer: Tokenizer,
        limits: Limits | None = None,
        *,
        root: str | Path | None = None,
        split: str = "train",
        eval_fraction: float = 0.0,
        blank_images: bool = False,
        max_bad_fraction: float = 0.1,
        workers: int = 2,
    ) -> None:
        check_split(split, eval_fraction)
        self.file = find_file(Path(path))
        self.name = f"{self.file}" if split == "train" else f"{self.file} ({split})"
        self.spec, self._tokenizer = spec, tokenizer
        self._limits, self._blank = limits or Limits(), blank_images
        self.counts = {"usable": 0, "unusable": 0, "audio": 0, "oversize": 0}
        bad: list[str] = []
        audio: list[str] = []
        items = [
            (place, raw)
            for place, raw in read_file(self.file)
            if eval_fraction == 0 or held_out(raw, place, eval_fraction) == (split == "eval")
        ]
        folder = Path(root) if root is not None else self.file.parent
        headers = _Headers(self._limits.max_frames)

        def examine(item: tuple[str, Any]) -> tuple[Record, Layout] | Exception:
            try:
                record = parse_record(*item, folder)
                media = [headers(kind, p) for kind, p in record.media]
                pieces = chat_pieces(record.turns, tokenizer)
                return record, lay_out(pieces, media, spec, self._limits)
            except (ValueError, OSError, AudioRecord) as e:
                return e

        self._records: list[tuple[Record, Layout]] = []
        with ThreadPoolExecutor(workers) as pool:
            for (place, raw), found in zip(items, pool.map(examine, items), strict=True):
                name = record_name(place, raw)
                if isinstance(found, tuple):
                    self._records.append(found)
                elif isinstance(found, AudioRecord):
                    audio.append(name)
                elif isinstance(found, OversizeError):
                    if self._limits.oversize == "error":
                        raise ValueError(f"{name}: {found}")
                    self.counts["oversize"] += 1
                    logger.warning("%s left out: %s", name, found)
                else:
                    bad.append(f"{name}: {found}")
                    logger.warning("%s left out: %s", name, found)
        self.counts |= {"usable": len(self._records), "unusable": len(bad), "audio": len(audio)}
        logger.info("%s: %s", self.name, ", ".join(f"{n} {k}" for k, n in self.counts.items()))
        if audio:
            names = ", ".join(audio[:5]) + (", ..." if len(audio) > 5 else "")
            logger.warning("%s: %d audio records skipped (%s)", self.name, len(audio), names)
        self._check_counts(bad, max_bad_fraction)

    def _check_counts(self, bad: list[str], max_bad_fraction: float) -> None:
        judged = len(bad) + len(self._records)
        first = "; ".join(bad[:3])
        if len(bad) > max_bad_fraction * judged:
            raise ValueError(
                f"{self.file}: {len(bad)} of {judged} records are unusable ({first}); repair them "
                f"or raise data.max_bad_fraction={max_bad_fraction}"
            )
        if not self._records:
            raise ValueError(
                f"{self.file}: no usable record ({self.counts}); see the log, and data.max_tokens "
                "if records are oversize"
            )

    def __len__(self) -> int:
        return len(self._records)

    def label(self, index: int) -> str:
        return self._records[index][0].name

    def shape(self, index: int) -> SampleShape:
        return self._records[index][1].shape

    def sample(self, index: int) -> Sample:
        record, layout = self._records[index]
        try:
            tiles = [
                grey_tiles(n, self.spec) if self._blank else self._decode(kind, path, n, layout)
                for (kind, path), n in zip(record.media, layout.tiles, strict=True)
            ]
            pieces = chat_pieces(record.turns, self._tokenizer)
            return assemble(pieces, layout, tiles, self.spec, self._tokenizer.visual_id)
        except ValueError as e:
            raise ValueError(f"{record.name}: {e}") from e

    def _decode(self, kind: str, path: Path | Blob, n: int, layout: Layout) -> np.ndarray:
        if kind == "video":
            return read_clip(path, n, self.spec.tile_px)
        return read_picture(path, self.spec.tile_px, min(self._limits.max_tiles, layout.cap - 1))


class _Headers:
    """Headers of media files, each read once: several records may show one picture."""

    def __init__(self, max_frames: int) -> None:
        self._max_frames = max_frames
        self._known: dict[tuple[str, Path | Blob], Header] = {}

    def __call__(self, kind: str, path: Path | Blob) -> Header:
        if (kind, path) not in self._known:
            self._known[kind, path] = self._read(kind, path)
        return self._known[kind, path]

    def _read(self, kind: str, path: Path | Blob) -> Header:
        if kind == "video":
            return Header(0, 0, count_frames(path, self._max_frames))
        return Header(*picture_size(path))
