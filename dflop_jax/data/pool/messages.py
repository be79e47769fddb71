"""What passes between a process that decodes and its parent: JSON lines, arrays in shared memory.

A segment is a file without a name (`memfd`), mapped by both. The process writes its samples into it
one after the other, the parent makes arrays of the same bytes; a segment is gone when the process
has begun the next one and the parent has dropped all arrays of it.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dflop_jax.data.datasets.shape_index import Row
from dflop_jax.data.decoder import BadSample
from dflop_jax.data.sample import Places, Sample
from dflop_jax.records import Load

SEGMENT_BYTES = 64 << 20  # of shared memory, at least
ALIGNMENT = 64  # bytes between places where arrays begin
MAX_LINE = 1 << 22  # bytes of a message


@dataclass(frozen=True)
class DecoderSetup:
    """First line to the process that forks decoders: what they serve, and what a request may take.

    `opens` is MODULE:FUNCTION, `arguments` what it is called with, as JSON. It returns a source,
    whose samples are then asked for by number, or a function that is given a request's line (and a
    `SharedSegment`) and returns the `DecoderReply`.
    """

    opens: str
    arguments: dict[str, Any]
    memory_bytes: int


@dataclass(frozen=True)
class ForkOrder:
    """A request to that process: fork a decoder (a socket comes along), or end one."""

    end: int = 0  # process id


@dataclass(frozen=True)
class ForkAnswer:
    """What that process answers: `pid` of a new decoder, or how one ended; `error`: there is no
    source."""

    pid: int = 0
    ended: str = ""
    error: str = ""


@dataclass(frozen=True)
class ArrayAt:
    """An array in the segment; `names` say what it is of the sample."""

    names: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class DecoderReply:
    """What a decoder answers: a sample's arrays, or why there is none; or rows of the index, or why
    there are none, of several records. `new_segment`: a file comes along. `fault`: a traceback, of
    an error of the program itself. `warnings`: what was logged. `retires`: the process has grown
    and ends after this."""

    arrays: tuple[ArrayAt, ...] = ()
    load: Load | None = None
    rows: tuple[Row | BadSample, ...] = ()
    reason: str = ""
    fault: str = ""
    warnings: tuple[str, ...] = ()
    new_segment: bool = False
    retires: bool = False


@dataclass
class SharedSegment:
    """The segment that a decoder writes into at present."""

    file: int = -1
    memory: mmap.mmap | None = None
    used: int = 0
    is_new: bool = field(default=False, init=False)

    def write(self, sample: Sample) -> tuple[ArrayAt, ...]:
        """Copy a sample's arrays, into a new segment where they do not fit into this one."""
        arrays = [(names, np.ascontiguousarray(a)) for names, a in _named_arrays(sample)]
        self._make_room(sum(_aligned(a.nbytes) for _, a in arrays))
        written = []
        for names, array in arrays:
            if array.dtype.kind not in "biuf":
                raise TypeError(f"field {names} of dtype {array.dtype} cannot be sent")
            if array.nbytes:
                assert self.memory is not None
                room = np.frombuffer(self.memory, np.uint8, array.nbytes, self.used)
                room[:] = array.reshape(-1).view(np.uint8)
            written.append(ArrayAt(names, array.dtype.str, array.shape, self.used))
            self.used += _aligned(array.nbytes)
        return tuple(written)

    def _make_room(self, size: int) -> None:
        self.is_new = self.memory is None or self.used + size > len(self.memory)
        if self.is_new:
            if self.file >= 0:
                os.close(self.file)
            self.file = _nameless_file()
            os.ftruncate(self.file, max(SEGMENT_BYTES, size))
            self.memory, self.used = mmap.mmap(self.file, max(SEGMENT_BYTES, size)), 0


def mapped(file: int) -> mmap.mmap:
    """A segment that came along, read-only; the file is closed."""
    try:
        return mmap.mmap(file, 0, access=mmap.ACCESS_READ)
    finally:
        os.close(file)


def received(reply: DecoderReply, segment: mmap.mmap | None) -> Sample:
    """The sample of a reply: its arrays are the segment's bytes. ValueError for an impossible
    one."""
    fields: dict[str, dict[str, np.ndarray]] = {}
    places: dict[tuple[str, str], dict[str, np.ndarray]] = {}
    for a in reply.arrays:
        dtype = np.dtype(a.dtype)
        if dtype.kind not in "biuf" or min(a.shape, default=0) < 0 or a.offset < 0:
            raise ValueError(f"an array {a}")
        n = int(np.prod(a.shape, dtype=object))
        flat = np.frombuffer(segment, dtype, n, a.offset) if n and segment else np.zeros(n, dtype)
        array = flat.reshape(a.shape)
        if a.names[0] == "field":
            fields.setdefault(a.names[1], {})[a.names[2]] = array
        else:
            places.setdefault((a.names[1], a.names[2]), {})[a.names[0]] = array
    joined = {pair: Places(p["index"], p.get("weight")) for pair, p in places.items()}
    assert reply.load is not None
    return Sample(fields, joined, reply.load)


def _named_arrays(sample: Sample) -> list[tuple[tuple[str, ...], np.ndarray]]:
    named: list[tuple[tuple[str, ...], np.ndarray]] = [
        (("field", module, name), array)
        for module, arrays in sample.fields.items()
        for name, array in arrays.items()
    ]
    for (source, target), places in sample.places.items():
        named.append((("index", source, target), places.index))
        if places.weight is not None:
            named.append((("weight", source, target), places.weight))
    return named


def _aligned(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("dflop-sample")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
