"""One process's stream of bytes on disk: few files, and every bit of them under a checksum.

The stream is a one-dimensional zarr array of bytes that TensorStore writes and reads: files of up
to FILE_BYTES ("shards"), each of blocks with a crc32c of their own and an index with another. No
zarr.json is written, as that would have none: the manifest says all it would. Each file starts with
the CRC-32 of its part of the stream, which the manifest repeats, so that a sound file of another
checkpoint (after an interrupted copy, say) is noticed too.
"""

from __future__ import annotations

import errno
import os
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from dflop_jax.checkpoint.format import CorruptCheckpoint, StoredFile, StreamLayout

BLOCK_BYTES = 1 << 20  # the least that is read and verified
FILE_BYTES = 256 << 20  # a multiple; bounds memory, as a file is formed whole before it is written
HEADER_BYTES = 8  # of a file: the CRC-32 of the rest, little endian
FILES_IN_FLIGHT = 2
CACHE_BYTES = 32 << 20  # for indices, and blocks that small arrays share


def layout_of(total_bytes: int) -> StreamLayout:
    """How a stream of that many bytes is cut; small ones make one small file."""
    needed = HEADER_BYTES + max(total_bytes, 1)
    block = min(BLOCK_BYTES, needed)
    blocks = min(FILE_BYTES // BLOCK_BYTES, -(-needed // block))
    return StreamLayout(total_bytes, block * blocks, block)


def write_stream(
    folder: Path, layout: StreamLayout, views: Iterable[np.ndarray]
) -> tuple[StoredFile, ...]:
    """Write the concatenated `views` (uint8[n]) and fsync the files; 0 bytes make no file.

    Raises:
      OSError: with the errno of the file system.
    """
    store = _open(folder, layout, new_context())
    pending: deque[Any] = deque()
    crcs: list[int] = []
    try:
        for crc, content in _file_contents(views, layout):
            if len(pending) == FILES_IN_FLIGHT:
                pending.popleft().result()
            begin = len(crcs) * layout.file_bytes
            crcs.append(crc)
            once = ts.Transaction()  # without it, a file may be written again for every block
            box = store.with_transaction(once)[begin : begin + content.size]
            box.write(content, can_reference_source_data_indefinitely=True).result()
            pending.append(once.commit_async())
        while pending:
            pending.popleft().result()
    except ValueError as e:
        for other in pending:  # the caller may remove the folder, so nothing may still write there
            with suppress(ValueError):
                other.result()
        raise _os_error(e, folder) from None
    names = [str(n) for n in range(len(crcs))]
    return tuple(StoredFile(n, (folder / n).stat().st_size, c) for n, c in zip(names, crcs))


def _file_contents(
    views: Iterable[np.ndarray], layout: StreamLayout
) -> Iterator[tuple[int, np.ndarray]]:
    """The stream cut into files: (CRC-32, header and bytes: uint8[<= file_bytes])."""
    left = layout.total_bytes
    content, used = np.empty(0, np.uint8), 0
    for view in views:
        while view.size:
            if used == content.size:
                content = np.empty(min(HEADER_BYTES + left, layout.file_bytes), np.uint8)
                used = HEADER_BYTES
            n = min(view.size, content.size - used)
            content[used : used + n] = view[:n]
            used, left, view = used + n, left - n, view[n:]
            if used == content.size:
                crc = zlib.crc32(content[HEADER_BYTES:].data)
                header = crc.to_bytes(HEADER_BYTES, "little")
                content[:HEADER_BYTES] = np.frombuffer(header, np.uint8)
                yield crc, content
    assert left == 0, f"{left} bytes fewer than the layout has"


def new_context() -> Any:
    """TensorStore's threads and cache, for `StreamReader`s to share."""
    return ts.Context(
        {
            "cache_pool": {"total_bytes_limit": CACHE_BYTES},
            "file_io_sync": True,
            # No file has two writers, and some cluster file systems have no locks.
            "file_io_locking": {"mode": "none"},
        }
    )


def _open(folder: Path, layout: StreamLayout, context: Any) -> Any:
    """The stream with its headers as an array of uint8, to write or to read; touches no file."""
    n_files = -(-layout.total_bytes // (layout.file_bytes - HEADER_BYTES))
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    sharding = {
        "chunk_shape": [layout.block_bytes],
        "codecs": [little, {"name": "crc32c"}],
        "index_codecs": [little, {"name": "crc32c"}],
    }
    shards = {"chunk_shape": [layout.file_bytes]}
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{folder}/"},
        "metadata": {
            "shape": [layout.total_bytes + n_files * HEADER_BYTES],
            "data_type": "uint8",
            "fill_value": 0,
            "chunk_grid": {"name": "regular", "configuration": shards},
            "chunk_key_encoding": {"name": "v2"},
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        },
        "open": True,
        "assume_metadata": True,  # there is no zarr.json
        "fill_missing_data_reads": False,  # an error, not zeros
        "store_data_equal_to_fill_value": True,
    }
    return ts.open(spec, context=context).result()


def _os_error(e: ValueError, path: Path) -> OSError:
    """TensorStore's error as that of the file system; EIO where it names none."""
    found = re.search(r"os_error_code='(\d+)'", str(e))
    if found is None:
        return OSError(errno.EIO, " ".join(str(e).split()), str(path))
    return OSError(int(found[1]), os.strerror(int(found[1])), str(path))


class StreamReader:
    """Reads any range of the stream that a process wrote. Threads may share one."""

    def __init__(
        self, folder: Path, layout: StreamLayout, files: Sequence[StoredFile], context: Any
    ):
        self._folder, self._layout, self._files = folder, layout, files
        self._store = _open(folder, layout, context)
        self._sound: set[int] = set()  # files whose size and header were right

    def start(self, offset_bytes: int, n_bytes: int) -> Callable[[], np.ndarray]:
        """Start to read `n_bytes` > 0; call the answer for them, uint8[n_bytes].

        Raises (here or there):
          CorruptCheckpoint: naming the file that is missing, truncated or damaged.
          OSError: a file may not be read.
        """
        payload = self._layout.file_bytes - HEADER_BYTES
        end, reads = offset_bytes + n_bytes, []
        while offset_bytes < end:
            file, at = divmod(offset_bytes, payload)
            n = min(end - offset_bytes, payload - at)
            self._check(file)
            begin = file * self._layout.file_bytes + HEADER_BYTES + at
            reads.append((file, self._store[begin : begin + n].read()))
            offset_bytes += n

        def finish() -> np.ndarray:
            got = [self._result(file, future) for file, future in reads]
            return got[0] if len(got) == 1 else np.concatenate(got)

        return finish

    def _check(self, file: int) -> None:
        """On first use of a file: it has the size and the header that the manifest says."""
        if file in self._sound:
            return
        said = self._files[file]
        path = self._folder / said.name
        try:
            size = path.stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            raise CorruptCheckpoint(f"{path}: missing") from None
        if size != said.size_bytes:
            raise CorruptCheckpoint(f"{path}: has {size} bytes, {said.size_bytes} were written")
        begin = file * self._layout.file_bytes
        header = self._result(file, self._store[begin : begin + HEADER_BYTES].read())
        if int.from_bytes(header.tobytes(), "little") != said.crc32:
            raise CorruptCheckpoint(f"{path}: is the file of another checkpoint")
        self._sound.add(file)

    def _result(self, file: int, future: Any) -> np.ndarray:
        path = self._folder / self._files[file].name
        try:
            return future.result()
        except ValueError as e:
            error = _os_error(e, path)
            if error.errno in (errno.EIO, errno.ENOENT):
                raise CorruptCheckpoint(f"{path}: damaged ({error.strerror})") from None
            raise error from None
