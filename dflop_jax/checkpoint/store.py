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
    ArrayBox,
    ArraySpec,
    CorruptCheckpoint,
    Manifest,
    OtherVersion,
    StorageError,
    StoredBox,
    WrittenFile,
    check_covered,
    decode_manifest,
    encode_manifest,
    process_file_path,
    safetensors_header,
    translate_lost_file,
    translate_storage_errors,
)
from dflop_jax.checkpoint.reader import CheckpointReader

__all__ = [
    "ArrayBox",
    "ArraySpec",
    "CheckpointReader",
    "CheckpointStore",
    "CorruptCheckpoint",
    "OtherVersion",
    "StorageError",
    "WrittenFile",
]


# Why a checkpoint is set aside.
DAMAGED, OTHER_VERSION, PASSED_OVER = "damaged", "other-version", "passed-over"
_SET_ASIDE_NAME = rf"(\d{{8,}})\.({DAMAGED}|{OTHER_VERSION}|{PASSED_OVER})(\.\d+)?"


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
        with translate_storage_errors("list the checkpoints", self.root):
            return tuple(step for step, committed in self._list_folders() if committed)

    def describe_missing_step(self, step: int | None, steps: Iterable[int]) -> str:
        """What is said where there is no checkpoint of a step, or none at all (None)."""
        missing = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        step_list = ", ".join(map(str, steps)) or "none; look at the folder's name"
        return f"{self.root}: {missing}; those that are there: {step_list}"

    def prepare(self, step: int) -> None:
        """Make the folder for a save, without what an interrupted one left there.

        Raises:
          ValueError: this checkpoint exists.
          StorageError: the folder cannot be made.
        """
        with translate_storage_errors(f"save checkpoint {step}", self.root):
            if (self.folder(step) / MARKER).exists():
                raise ValueError(
                    f"{self.folder(step)}: this checkpoint exists; discard it or use another folder"
                )
            _remove(self.folder(step))
            self.folder(step).mkdir(parents=True)
            _sync(self.root)

    def write(
        self, step: int, specs: Mapping[str, ArraySpec], boxes: Iterable[ArrayBox], process: int
    ) -> WrittenFile:
        """Write what this process holds, beside the others; on disk when it returns. `specs` are
        those of its own arrays at least, by name.

        Raises:
          StorageError: disk full, no permission and the like.
        """
        path = process_file_path(self.folder(step), process)
        with translate_storage_errors(f"save checkpoint {step}", self.root):
            return _write_file(path, specs, boxes, process)

    def commit(
        self,
        step: int,
        specs: Mapping[str, ArraySpec],
        files: Sequence[WrittenFile],
        run_state: Mapping[str, Any],
    ) -> Path:
        """Make what the processes wrote a checkpoint, then remove those that are too many.

        `specs` are those of all arrays by name; `meta` is JSON (it comes back with lists for
        tuples). Returns the checkpoint's folder; on failure there is no such checkpoint.

        Raises:
          ValueError: the parts do not cover every array exactly once.
          StorageError: as `write`; also when only the removal of old checkpoints failed.
        """
        boxes: dict[str, list[StoredBox]] = {name: [] for name in specs}
        for box in (p for file in files for p in file.boxes):
            boxes[box.name].append(box)
        for name, spec in specs.items():
            check_covered(spec, boxes[name])
        arrays = tuple(specs[name] for name in sorted(specs))
        ordered = tuple(sorted(files, key=lambda p: p.process))
        manifest = encode_manifest(Manifest(step, arrays, ordered, dict(run_state)))
        folder = self.folder(step)
        with translate_storage_errors(f"save checkpoint {step}", self.root):
            try:
                _check_file_sizes(folder, files)
                _write_synced(folder / MANIFEST, manifest)
                _write_synced(folder / f"{MARKER}.tmp", _make_marker(manifest))
                _sync(folder)
                os.replace(folder / f"{MARKER}.tmp", folder / MARKER)
                _sync(folder)
            except OSError:
                with suppress(OSError):
                    _remove(folder)
                raise
        with translate_storage_errors(f"remove older checkpoints ({step} is saved)", self.root):
            self._prune(step)
        return folder

    def discard(self, step: int) -> None:
        """Remove a checkpoint, committed or not; none is fine.

        Raises:
          StorageError: it cannot be removed.
        """
        with translate_storage_errors(f"remove checkpoint {step}", self.root):
            _remove(self.folder(step))

    def open(self, step: int) -> CheckpointReader:
        """A reader of a committed checkpoint whose manifest is sound.

        Raises:
          CorruptCheckpoint: it is not.
          StorageError: its files may not be read.
          OtherVersion: written in another version of the format.
        """
        folder = self.folder(step)
        with translate_storage_errors(f"read checkpoint {step}", self.root):
            marker, data = _read_file(folder / MARKER), _read_file(folder / MANIFEST)
        if marker != _make_marker(data):
            raise CorruptCheckpoint(f"{folder / MANIFEST}: damaged (its checksum, or {MARKER})")
        try:
            manifest = decode_manifest(data)
        except OtherVersion as e:
            raise OtherVersion(f"{folder / MANIFEST}: {e}") from None
        if manifest.step != step:
            raise CorruptCheckpoint(f"{folder}: holds step {manifest.step}; rename it back")
        return CheckpointReader(folder, manifest)

    def set_aside(self, step: int, reason: str) -> Path:
        """Rename a checkpoint that cannot be read, or is not to be, so that its step may be saved
        anew; returns its folder, `00000120.damaged` where `why` is DAMAGED. Nothing lists it, and
        it is removed when a checkpoint of this step or a newer one is committed.

        Raises:
          StorageError: it cannot be renamed.
        """
        assert re.fullmatch(_SET_ASIDE_NAME, f"{step:08d}.{reason}"), reason
        with translate_storage_errors(f"set checkpoint {step} aside", self.root):
            folder, n = self.root / f"{step:08d}.{reason}", 1
            while folder.exists():
                n += 1
                folder = self.root / f"{step:08d}.{reason}.{n}"
            self.folder(step).rename(folder)
            _sync(self.root)
        return folder

    def _list_folders(self) -> list[tuple[int, bool]]:
        """(step, committed) of every checkpoint folder, newest first."""
        try:
            names = os.listdir(self.root)
        except FileNotFoundError:
            return []
        steps = (int(n) for n in names if re.fullmatch(r"\d{8,}", n))
        return [(s, (self.folder(s) / MARKER).exists()) for s in sorted(steps, reverse=True)]

    def _prune(self, step: int) -> None:
        steps = self._list_folders()
        other_steps = [s for s, committed in steps if committed and s != step]
        leftovers = [s for s, committed in steps if not committed and s < step]
        kept_steps = {*other_steps[: self.keep - 1], self.best}
        if self.keep_every:
            kept_steps |= _first_of_each_period(
                (s for s, committed in steps if committed), self.keep_every
            )
        for old in leftovers + [s for s in other_steps if s not in kept_steps]:
            _remove(self.folder(old))
        for name in os.listdir(self.root):
            if (match := re.fullmatch(_SET_ASIDE_NAME, name)) and int(match[1]) <= step:
                _remove(self.root / name)


def _first_of_each_period(steps: Iterable[int], every: int) -> set[int]:
    """The first of the steps in every full `every`: those below the first multiple do not count.

    Steps that are saved by time are no multiples, and one that is the first stays so."""
    first: dict[int, int] = {}
    for step in sorted(steps):
        first.setdefault(step // every, step)
    return {step for n, step in first.items() if n}


def _write_file(
    path: Path, specs: Mapping[str, ArraySpec], boxes: Iterable[ArrayBox], process: int
) -> WrittenFile:
    """Write the file of the pieces that a process holds, and fsync; without pieces there is none.
    Returns what process 0 is told of it.

    The order is that of (name, start), whatever the order given, so the bytes are the same. Pieces
    without elements have no place.
    """
    ordered = sorted((p for p in boxes if p.array.size), key=lambda p: (p.name, p.start))
    header = b""
    if ordered:  # its length does not depend on where the pieces begin
        header = safetensors_header(specs, _locate_boxes(ordered, 0))
    crc32s: list[int] = []
    if ordered:
        with path.open("wb") as file:
            for block in _split_into_blocks(header, ordered, crc32s):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
    n_bytes = len(header) + sum(p.array.nbytes for p in ordered)
    stored = tuple(_locate_boxes(ordered, len(header)))
    return WrittenFile(process, n_bytes, tuple(crc32s), stored)


def _locate_boxes(boxes: Iterable[ArrayBox], offset: int) -> Iterator[StoredBox]:
    """Where the pieces lie, of which the first begins at an offset."""
    for p in boxes:
        yield StoredBox(p.name, tuple(map(int, p.start)), p.array.shape, offset)
        offset += p.array.nbytes


def _split_into_blocks(
    header: bytes, boxes: Sequence[ArrayBox], crc32s: list[int]
) -> Iterator[memoryview]:
    """Header and pieces in C order, no part of more than a block; the CRC-32 of each block is added
    to `crc32s`."""
    crc, used = 0, 0
    for remaining in (memoryview(header), *(_bytes_of(p.array) for p in boxes)):
        while remaining:
            block, remaining = remaining[: BLOCK_BYTES - used], remaining[BLOCK_BYTES - used :]
            yield block
            crc, used = zlib.crc32(block, crc), used + len(block)
            if used == BLOCK_BYTES:
                crc32s.append(crc)
                crc, used = 0, 0
    if used:
        crc32s.append(crc)


def _bytes_of(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _make_marker(manifest: bytes) -> bytes:
    return f"sha256 {hashlib.sha256(manifest).hexdigest()} {MANIFEST}\n".encode()


def _read_file(path: Path) -> bytes:
    with translate_lost_file(path):
        return path.read_bytes()


def _check_file_sizes(folder: Path, files: Iterable[WrittenFile]) -> None:
    """Every process's file is here, as long as it was there."""
    for file in files:
        path = process_file_path(folder, file.process)
        if file.n_bytes and not (path.exists() and path.stat().st_size == file.n_bytes):
            raise OSError(
                errno.ENOENT,
                f"{path} is not as process {file.process} wrote it; all processes need one"
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
