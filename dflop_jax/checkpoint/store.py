"""Checkpoints on disk: saved by many processes, committed at once, read back in any sharding.

A checkpoint is one folder. Every process writes its own pieces there (`write`), then process 0 adds
the manifest and last, by one rename, the marker (`commit`): without the marker the checkpoint does
not exist. The marker holds the manifest's SHA-256, the manifest a checksum of every block of every
file, so no flipped bit goes unnoticed. See docs/checkpoints.md.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from dflop_jax.checkpoint.format import (
    BLOCK_BYTES,
    MANIFEST,
    MARKER,
    ArrayPiece,
    ArraySpec,
    CorruptCheckpoint,
    Manifest,
    OtherVersion,
    StorageError,
    StoredPiece,
    WrittenPart,
    check_covered,
    decode_manifest,
    encode_manifest,
    lost_file,
    process_file,
    safetensors_header,
    storage_errors,
)
from dflop_jax.checkpoint.reader import CheckpointReader

__all__ = [
    "ArrayPiece",
    "ArraySpec",
    "CheckpointReader",
    "CheckpointStore",
    "CorruptCheckpoint",
    "OtherVersion",
    "StorageError",
    "WrittenPart",
]


# Why a checkpoint is set aside.
DAMAGED, OTHER_VERSION, PASSED_OVER = "damaged", "other-version", "passed-over"
_ASIDE = rf"(\d{{8,}})\.({DAMAGED}|{OTHER_VERSION}|{PASSED_OVER})(\.\d+)?"


class CheckpointStore:
    """The checkpoints of one run, of which the newest `keep` stay, the first of every `keep_every`
    steps (0: none), and that of step `best`, which may change at any time.

    One save: `prepare` on process 0, a barrier, `write` on every process, their parts sent to
    process 0, and there `commit`, or `discard` if any of them failed. One save at a time.
    """

    def __init__(self, root: Path, *, keep: int = 3, keep_every: int = 0):
        self.root, self.keep, self.keep_every = root, keep, keep_every
        self.best: int | None = None

    def folder(self, step: int) -> Path:
        """Where the checkpoint of a step is, or would be."""
        assert step >= 0, step
        return self.root / f"{step:08d}"

    def steps(self) -> tuple[int, ...]:
        """Steps of the committed checkpoints, newest first; none if there is no root folder.

        Raises:
          StorageError: the folder cannot be listed.
        """
        with storage_errors("list the checkpoints", self.root):
            return tuple(step for step, committed in self._found() if committed)

    def no_step(self, step: int | None, there: Iterable[int]) -> str:
        """What is said where there is no checkpoint of a step, or none at all (None)."""
        which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        known = ", ".join(map(str, there)) or "none; look at the folder's name"
        return f"{self.root}: {which}; those that are there: {known}"

    def prepare(self, step: int) -> None:
        """Make the folder for a save, without what an interrupted one left there.

        Raises:
          ValueError: this checkpoint exists.
          StorageError: the folder cannot be made.
        """
        with storage_errors(f"save checkpoint {step}", self.root):
            if (self.folder(step) / MARKER).exists():
                raise ValueError(
                    f"{self.folder(step)}: this checkpoint exists; discard it or use another folder"
                )
            _remove(self.folder(step))
            self.folder(step).mkdir(parents=True)
            _sync(self.root)

    def write(
        self, step: int, specs: Mapping[str, ArraySpec], pieces: Iterable[ArrayPiece], process: int
    ) -> WrittenPart:
        """Write what this process holds, beside the others; on disk when it returns. `specs` are
        those of its own arrays at least, by name.

        Raises:
          StorageError: disk full, no permission and the like.
        """
        path = process_file(self.folder(step), process)
        with storage_errors(f"save checkpoint {step}", self.root):
            return _write_part(path, specs, pieces, process)

    def commit(
        self,
        step: int,
        specs: Mapping[str, ArraySpec],
        parts: Sequence[WrittenPart],
        meta: Mapping[str, Any],
    ) -> Path:
        """Make what the processes wrote a checkpoint, then remove those that are too many.

        `specs` are those of all arrays by name; `meta` is JSON (it comes back with lists for
        tuples). Returns the checkpoint's folder; on failure there is no such checkpoint.

        Raises:
          ValueError: the parts do not cover every array exactly once.
          StorageError: as `write`; also when only the removal of old checkpoints failed.
        """
        pieces: dict[str, list[StoredPiece]] = {name: [] for name in specs}
        for piece in (p for part in parts for p in part.pieces):
            pieces[piece.name].append(piece)
        for name, spec in specs.items():
            check_covered(spec, pieces[name])
        arrays = tuple(specs[name] for name in sorted(specs))
        ordered = tuple(sorted(parts, key=lambda p: p.process))
        manifest = encode_manifest(Manifest(step, arrays, ordered, dict(meta)))
        folder = self.folder(step)
        with storage_errors(f"save checkpoint {step}", self.root):
            try:
                _check_seen(folder, parts)
                _write_synced(folder / MANIFEST, manifest)
                _write_synced(folder / f"{MARKER}.tmp", _marker(manifest))
                _sync(folder)
                os.replace(folder / f"{MARKER}.tmp", folder / MARKER)
                _sync(folder)
            except OSError:
                with suppress(OSError):
                    _remove(folder)
                raise
        with storage_errors(f"remove older checkpoints ({step} is saved)", self.root):
            self._prune(step)
        return folder

    def discard(self, step: int) -> None:
        """Remove a checkpoint, committed or not; none is fine.

        Raises:
          StorageError: it cannot be removed.
        """
        with storage_errors(f"remove checkpoint {step}", self.root):
            _remove(self.folder(step))

    def open(self, step: int) -> CheckpointReader:
        """A reader of a committed checkpoint whose manifest is sound.

        Raises:
          CorruptCheckpoint: it is not.
          StorageError: its files may not be read.
          OtherVersion: written in another version of the format.
        """
        folder = self.folder(step)
        with storage_errors(f"read checkpoint {step}", self.root):
            marker, data = _read_file(folder / MARKER), _read_file(folder / MANIFEST)
        if marker != _marker(data):
            raise CorruptCheckpoint(f"{folder / MANIFEST}: damaged (its checksum, or {MARKER})")
        try:
            manifest = decode_manifest(data)
        except OtherVersion as e:
            raise OtherVersion(f"{folder / MANIFEST}: {e}") from None
        if manifest.step != step:
            raise CorruptCheckpoint(f"{folder}: holds step {manifest.step}; rename it back")
        return CheckpointReader(folder, manifest)

    def set_aside(self, step: int, why: str) -> Path:
        """Rename a checkpoint that cannot be read, or is not to be, so that its step may be saved
        anew; returns its folder, `00000120.damaged` where `why` is DAMAGED. Nothing lists it, and
        it is removed when a checkpoint of this step or a newer one is committed.

        Raises:
          StorageError: it cannot be renamed.
        """
        assert re.fullmatch(_ASIDE, f"{step:08d}.{why}"), why
        with storage_errors(f"set checkpoint {step} aside", self.root):
            folder, n = self.root / f"{step:08d}.{why}", 1
            while folder.exists():
                n += 1
                folder = self.root / f"{step:08d}.{why}.{n}"
            self.folder(step).rename(folder)
            _sync(self.root)
        return folder

    def _found(self) -> list[tuple[int, bool]]:
        """(step, committed) of every checkpoint folder, newest first."""
        try:
            names = os.listdir(self.root)
        except FileNotFoundError:
            return []
        steps = (int(n) for n in names if re.fullmatch(r"\d{8,}", n))
        return [(s, (self.folder(s) / MARKER).exists()) for s in sorted(steps, reverse=True)]

    def _prune(self, step: int) -> None:
        steps = self._found()
        others = [s for s, committed in steps if committed and s != step]
        leftovers = [s for s, committed in steps if not committed and s < step]
        stay = {*others[: self.keep - 1], self.best}
        if self.keep_every:
            stay |= _firsts((s for s, committed in steps if committed), self.keep_every)
        for old in leftovers + [s for s in others if s not in stay]:
            _remove(self.folder(old))
        for name in os.listdir(self.root):
            if (aside := re.fullmatch(_ASIDE, name)) and int(aside[1]) <= step:
                _remove(self.root / name)


def _firsts(steps: Iterable[int], every: int) -> set[int]:
    """The first of the steps in every full `every`: those below the first multiple do not count.

    Steps that are saved by time are no multiples, and one that is the first stays so."""
    first: dict[int, int] = {}
    for step in sorted(steps):
        first.setdefault(step // every, step)
    return {step for n, step in first.items() if n}


def _write_part(
    path: Path, specs: Mapping[str, ArraySpec], pieces: Iterable[ArrayPiece], process: int
) -> WrittenPart:
    """Write the file of the pieces that a process holds, and fsync; without pieces there is none.
    Returns what process 0 is told of it.

    The order is that of (name, start), whatever the order given, so the bytes are the same. Pieces
    without elements have no place.
    """
    ordered = sorted((p for p in pieces if p.array.size), key=lambda p: (p.name, p.start))
    header = b""
    if ordered:  # its length does not depend on where the pieces begin
        header = safetensors_header(specs, _stored(ordered, 0))
    crc32s: list[int] = []
    if ordered:
        with path.open("wb") as out:
            for block in _blocks(header, ordered, crc32s):
                out.write(block)
            out.flush()
            os.fsync(out.fileno())
    n_bytes = len(header) + sum(p.array.nbytes for p in ordered)
    stored = tuple(_stored(ordered, len(header)))
    return WrittenPart(process, n_bytes, tuple(crc32s), stored)


def _stored(pieces: Iterable[ArrayPiece], offset: int) -> Iterator[StoredPiece]:
    """Where the pieces lie, of which the first begins at an offset."""
    for p in pieces:
        yield StoredPiece(p.name, tuple(map(int, p.start)), p.array.shape, offset)
        offset += p.array.nbytes


def _blocks(header: bytes, pieces: Sequence[ArrayPiece], crc32s: list[int]) -> Iterator[memoryview]:
    """Header and pieces in C order, no part of more than a block; the CRC-32 of each block is added
    to `crc32s`."""
    crc, used = 0, 0
    for left in (memoryview(header), *(_bytes_of(p.array) for p in pieces)):
        while left:
            now, left = left[: BLOCK_BYTES - used], left[BLOCK_BYTES - used :]
            yield now
            crc, used = zlib.crc32(now, crc), used + len(now)
            if used == BLOCK_BYTES:
                crc32s.append(crc)
                crc, used = 0, 0
    if used:
        crc32s.append(crc)


def _bytes_of(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _marker(manifest: bytes) -> bytes:
    return f"sha256 {hashlib.sha256(manifest).hexdigest()} {MANIFEST}\n".encode()


def _read_file(path: Path) -> bytes:
    with lost_file(path):
        return path.read_bytes()


def _check_seen(folder: Path, parts: Iterable[WrittenPart]) -> None:
    """Every process's file is here, as long as it was there."""
    for part in parts:
        path = process_file(folder, part.process)
        if part.n_bytes and not (path.exists() and path.stat().st_size == part.n_bytes):
            raise OSError(
                errno.ENOENT,
                f"{path} is not as process {part.process} wrote it; all processes need one"
                " shared folder",
            )


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())


def _sync(folder: Path) -> None:
    """Make the folder's entries survive a power failure."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove(folder: Path) -> None:
    """Remove a checkpoint, marker first: killed in between, it does not exist."""
    with suppress(FileNotFoundError):
        (folder / MARKER).unlink()
        _sync(folder)
    with suppress(FileNotFoundError):
        shutil.rmtree(folder)
