"""Checkpoints on disk: written by many processes, committed atomically, read in any sharding.

A checkpoint is one folder. Every process writes its own boxes there (`write`), then process 0 adds
the manifest and, by one rename, the marker (`commit`). A folder without a marker is no checkpoint.
The marker holds the manifest's SHA-256, and the manifest a checksum of every block of every file,
so every flipped bit is detected. See docs/checkpoints.md.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import mmap
import os
import re
import shutil
import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from dflop_jax.checkpoint import format
from dflop_jax.checkpoint.format import (
    MANIFEST,
    MARKER,
    ArrayBox,
    ArraySpec,
    CorruptCheckpoint,
    Manifest,
    OtherVersion,
    StoredBox,
    WrittenFile,
    process_file_path,
    translate_lost_file,
    translate_storage_errors,
)

OPEN_FILES = 32  # processes' files open at once; the default limit is 1,024 per process
# Reasons for which a checkpoint is set aside.
DAMAGED, OTHER_VERSION, PASSED_OVER = "damaged", "other-version", "passed-over"
_SET_ASIDE_NAME = rf"(\d{{8,}})\.({DAMAGED}|{OTHER_VERSION}|{PASSED_OVER})(\.\d+)?"


class CheckpointStore:
    """The checkpoints of one run. A commit keeps the newest `keep`, the first of every `keep_every`
    steps (0: none), and that of step `best`, which may change at any time, and removes the others.

    To save, call `prepare` on process 0, a barrier, `write` on every process, and on process 0
    `commit`, or `discard` if a process failed. Disk errors become StorageError.
    """

    def __init__(self, root: Path, *, keep: int = 3, keep_every: int = 0):
        self.root, self.keep, self.keep_every = root, keep, keep_every
        self.best: int | None = None

    def folder(self, step: int) -> Path:
        return self.root / f"{step:08d}"

    def steps(self) -> tuple[int, ...]:
        """Return the steps of committed checkpoints, newest first; () without a root folder."""
        with translate_storage_errors("list the checkpoints", self.root):
            return tuple(step for step, committed in self._list_folders() if committed)

    def describe_missing_step(self, step: int | None, steps: Iterable[int]) -> str:
        """Return the message that a step has no checkpoint, or that there is none at all (None)."""
        missing = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        step_list = ", ".join(map(str, steps)) or "none; look at the folder's name"
        return f"{self.root}: {missing}; existing steps: {step_list}"

    def prepare(self, step: int) -> None:
        """Make an empty folder for a save, replacing that of an interrupted save; ValueError if the
        checkpoint exists."""
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
        """Write and sync the file of a process, unless it has no data. `specs` has at least the
        process's own arrays, by name.

        Boxes are sorted by (name, start), so that equal boxes always make equal files.
        """
        ordered = sorted((p for p in boxes if p.array.size), key=lambda p: (p.name, p.start))
        if not ordered:
            return WrittenFile(process, 0, (), ())
        # The header's length does not depend on the boxes' offsets.
        header = format.safetensors_header(specs, _locate_boxes(ordered, 0))
        stored = tuple(_locate_boxes(ordered, len(header)))
        crc32s: list[int] = []
        path = process_file_path(self.folder(step), process)
        with translate_storage_errors(f"save checkpoint {step}", self.root), path.open("wb") as f:
            for block in _split_into_blocks(header, ordered, crc32s):
                f.write(block)
            f.flush()
            os.fsync(f.fileno())
        n_bytes = len(header) + sum(p.array.nbytes for p in ordered)
        return WrittenFile(process, n_bytes, tuple(crc32s), stored)

    def commit(
        self,
        step: int,
        specs: Mapping[str, ArraySpec],
        files: Sequence[WrittenFile],
        run_state: Mapping[str, Any],
    ) -> Path:
        """Commit the files of all processes as a checkpoint, then remove the older checkpoints that
        are not kept, and return the folder.

        `specs` has all arrays by name; `run_state` is JSON. If the commit fails, there is no such
        checkpoint; if only the removal fails, there is.

        Raises:
          ValueError: the files do not cover every array exactly once.
        """
        boxes: dict[str, list[StoredBox]] = {name: [] for name in specs}
        for box in (p for file in files for p in file.boxes):
            boxes[box.name].append(box)
        for name, spec in specs.items():
            format.check_covered(spec, boxes[name])
        arrays = tuple(specs[name] for name in sorted(specs))
        ordered = tuple(sorted(files, key=lambda p: p.process))
        manifest = format.encode_manifest(Manifest(step, arrays, ordered, dict(run_state)))
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
        with translate_storage_errors(f"remove checkpoint {step}", self.root):
            _remove(self.folder(step))

    def open(self, step: int) -> CheckpointReader:
        """Return a reader of a committed checkpoint; CorruptCheckpoint if its manifest is damaged,
        OtherVersion if it has another format version."""
        folder = self.folder(step)
        with translate_storage_errors(f"read checkpoint {step}", self.root):
            marker, data = _read_file(folder / MARKER), _read_file(folder / MANIFEST)
        if marker != _make_marker(data):
            raise CorruptCheckpoint(f"{folder / MANIFEST}: damaged (its checksum, or {MARKER})")
        try:
            manifest = format.decode_manifest(data)
        except OtherVersion as e:
            raise OtherVersion(f"{folder / MANIFEST}: {e}") from None
        if manifest.step != step:
            raise CorruptCheckpoint(f"{folder}: contains step {manifest.step}; rename it back")
        return CheckpointReader(folder, manifest)

    def set_aside(self, step: int, reason: str) -> Path:
        """Rename a checkpoint so that its step can be saved again, and return its new folder, such
        as `00000120.damaged`. Readers ignore it, and the next commit of this step or of a newer one
        removes it."""
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
        """Return (step, is committed) of every checkpoint folder, newest first."""
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
    """Return the first step of each period of `every` steps, except the period from 0."""
    first: dict[int, int] = {}
    for step in sorted(steps):
        first.setdefault(step // every, step)
    return {step for n, step in first.items() if n}


def _locate_boxes(boxes: Iterable[ArrayBox], offset: int) -> Iterator[StoredBox]:
    for p in boxes:
        yield StoredBox(p.name, tuple(map(int, p.start)), p.array.shape, offset)
        offset += p.array.nbytes


def _split_into_blocks(
    header: bytes, boxes: Sequence[ArrayBox], crc32s: list[int]
) -> Iterator[memoryview]:
    """Yield the bytes of header and boxes, in C order, in parts of at most a block, and append the
    CRC-32 of each block to `crc32s`."""
    crc, used = 0, 0
    arrays = (np.ascontiguousarray(p.array).reshape(-1).view(np.uint8).data for p in boxes)
    for remaining in itertools.chain([memoryview(header)], arrays):
        while remaining:
            n_left = format.BLOCK_BYTES - used
            block, remaining = remaining[:n_left], remaining[n_left:]
            yield block
            crc, used = zlib.crc32(block, crc), used + len(block)
            if used == format.BLOCK_BYTES:
                crc32s.append(crc)
                crc, used = 0, 0
    if used:
        crc32s.append(crc)


def _make_marker(manifest: bytes) -> bytes:
    return f"sha256 {hashlib.sha256(manifest).hexdigest()} {MANIFEST}\n".encode()


def _read_file(path: Path) -> bytes:
    with translate_lost_file(path):
        return path.read_bytes()


def _check_file_sizes(folder: Path, files: Iterable[WrittenFile]) -> None:
    for file in files:
        path = process_file_path(folder, file.process)
        if file.n_bytes and not (path.exists() and path.stat().st_size == file.n_bytes):
            reason = f"{path} differs from the file that process {file.process} wrote"
            raise OSError(errno.ENOENT, f"{reason}; all processes need one shared folder")


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())


def _sync(folder: Path) -> None:
    """Write the folder's entries to disk, so that they survive a power failure."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove(folder: Path) -> None:
    """Remove a checkpoint, its marker first, so that a half-removed one does not count as one."""
    with suppress(FileNotFoundError):
        (folder / MARKER).unlink()
        _sync(folder)
    with suppress(FileNotFoundError):
        shutil.rmtree(folder)


class CheckpointReader:
    """Reads the arrays of a committed checkpoint; thread-safe."""

    def __init__(self, folder: Path, manifest: Manifest):
        self.step, self.run_state = manifest.step, manifest.run_state
        self.specs = {spec.name: spec for spec in manifest.arrays}
        self._folder = folder
        self._boxes: dict[str, list[tuple[int, StoredBox]]] = {n: [] for n in self.specs}
        for written_file in manifest.files:
            for box in written_file.boxes:
                self._boxes[box.name].append((written_file.process, box))
        files = {p.process: p for p in manifest.files}

        @lru_cache(OPEN_FILES)
        def opened(process: int) -> _OpenFile:
            return _OpenFile(process_file_path(folder, process), files[process])

        self._opened = opened

    def __str__(self) -> str:
        return str(self._folder)

    def read(self, name: str, start: Sequence[int], shape: Sequence[int]) -> np.ndarray:
        """Return a slice of an array: `shape` elements from index `start`. CorruptCheckpoint if a
        file that holds a part of it is missing, truncated or damaged."""
        result = np.empty(tuple(shape), self.specs[name].numpy_dtype)
        try:
            with translate_storage_errors(f"read array {name}", self._folder):
                for process, box in self._boxes[name]:
                    low = np.maximum(start, box.start)
                    high = np.minimum(np.add(start, shape), np.add(box.start, box.shape))
                    if (low < high).all():
                        stored = self._opened(process).read_box(box, low, high, result.dtype)
                        result[_slices(start, low, high)] = stored
        except CorruptCheckpoint:
            if (self._folder / MARKER).exists():
                raise
            raise CorruptCheckpoint(f"{self._folder}: removed while it was read") from None
        return result


def _slices(first: Sequence[int], low: np.ndarray, high: np.ndarray) -> tuple[slice, ...]:
    return tuple(slice(int(a - f), int(b - f)) for f, a, b in zip(first, low, high, strict=True))


class _OpenFile:
    """The open file of a process, closed with its last reference; CorruptCheckpoint if the file is
    missing, truncated or damaged."""

    def __init__(self, path: Path, written_file: WrittenFile):
        self._path, self._crc32s = path, written_file.crc32s
        with translate_lost_file(path):
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._descriptor)
            size = os.fstat(self._descriptor).st_size
            if size != written_file.n_bytes:
                raise CorruptCheckpoint(
                    f"{path}: has {size} bytes, but {written_file.n_bytes} were written"
                )
            mapped = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
        self._bytes = np.frombuffer(mapped, np.uint8)
        self._verified_blocks = set[int]()
        # The header before the boxes is for other programs, but is verified here, too.
        self._check(0, min(p.offset_bytes for p in written_file.boxes))

    def read_box(
        self, box: StoredBox, low: np.ndarray, high: np.ndarray, dtype: np.dtype
    ) -> np.ndarray:
        """Return the verified values that a stored box has of its array from `low` to `high`."""
        stored = np.ndarray(box.shape, dtype, self._bytes, box.offset_bytes)
        index: Any = (*_slices(box.start, low, high), ...)  # ...: 0 dims also give an array
        values = stored[index]
        first, stop = byte_bounds(values)
        file_start = byte_bounds(self._bytes)[0]
        self._check(first - file_start, stop - file_start)
        return values

    def _check(self, first: int, stop: int) -> None:
        """Verify the checksums of the blocks of these bytes, each once. Uses `os.pread`, since a
        disk error in mapped memory would end the process."""
        for number in range(first // format.BLOCK_BYTES, -(-stop // format.BLOCK_BYTES)):
            if number in self._verified_blocks:
                continue
            offset, crc = number * format.BLOCK_BYTES, 0
            end = offset + format.BLOCK_BYTES  # or the end of the file
            with translate_lost_file(self._path):
                while data := os.pread(self._descriptor, end - offset, offset):
                    crc, offset = zlib.crc32(data, crc), offset + len(data)
            if crc != self._crc32s[number]:
                raise CorruptCheckpoint(f"{self._path}: damaged (its checksum)")
            self._verified_blocks.add(number)
