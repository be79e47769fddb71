"""Decoding in processes that can be killed: a deadline and a memory limit for every sample.

A sample that its process does not survive is a bad one. Deaths are looked at twice, each time in a
fresh process, since others may kill a process too.
"""

from __future__ import annotations

import logging
import mmap
import os
import subprocess
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import IO, NamedTuple

import msgspec
import numpy as np

from dflop_jax.child_processes import child_command
from dflop_jax.data.datasets.record_table import IndexRow
from dflop_jax.data.decoder import BadSample, DecodeResult, ThreadDecoder, check_load
from dflop_jax.data.sample import Sample, Source, SourceFactory

# One thread each: there are as many processes as the user wants, and threads do not survive a fork.
# Arrow's own allocators reserve 1 GiB at once, which would count as what a sample takes.
ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
               "TOKENIZERS_PARALLELISM": "false",
               "ARROW_DEFAULT_MEMORY_POOL": "system"}  # fmt: skip
ALIGNMENT_BYTES = 64  # bytes between places where arrays begin
MAX_TRIES = 2  # of a sample whose process dies
logger = logging.getLogger("dflop_jax.data")


def make_decoder(
    source: Source, workers: int, timeout_s: float, memory_bytes: int
) -> ThreadDecoder:
    """Return a decoder of a source: processes where it has a `factory` (see `SourceFactory`), else
    threads."""
    if getattr(source, "factory", None) is None or not hasattr(os, "fork"):
        return ThreadDecoder(source, workers)
    return ProcessDecoder(source, workers, timeout_s, memory_bytes)


class ProcessDecoder(ThreadDecoder):
    """Decodes in `workers` processes, each asked by a thread.

    Args:
      source: its `factory` says how another process opens it (see `sample.SourceFactory`).
      timeout_s: seconds that a sample may take.
      memory_bytes: what decoding a sample may allocate, beyond what the source takes.
    """

    def __init__(self, source: Source, workers: int, timeout_s: float, memory_bytes: int) -> None:
        super().__init__(source, workers)
        self._pool_of_processes = DecoderPool(source.factory, timeout_s, memory_bytes)  # type: ignore[attr-defined]

    def close(self) -> None:
        """End the processes, also while they decode."""
        self._pool_of_processes.kill()
        super().close()
        self._pool_of_processes.close()

    def _decode(self, index: int) -> DecodeResult:
        answer = self._pool_of_processes.answer(b"%d" % index, self._source.label(index))
        decoded = answer if isinstance(answer, BadSample) else answer.sample
        assert decoded is not None
        return check_load(self._source, index, decoded)


class DecoderProcess(NamedTuple):
    """A decoder, and where to reach it."""

    pid: int
    channel: Connection


class DecoderPool:
    """Processes that answer requests: as many as are asked at once, each within its limits. One
    more process forks them (see `fork_server_main`) and is begun anew when it dies.

    Args:
      factory: opens what they serve: a source, whose samples are asked for by number, or a
        function that gives a request its `DecoderReply`.
      timeout_s: seconds that an answer may take.
      memory_bytes: what an answer may allocate.
    """

    def __init__(self, factory: SourceFactory, timeout_s: float, memory_bytes: int) -> None:
        self._factory, self._timeout_s, self._memory_bytes = factory, timeout_s, memory_bytes
        self._lock = threading.Lock()  # of what follows
        self._server: subprocess.Popen[bytes] | None = None
        self._control: Connection
        self._idle: list[DecoderProcess] = []
        self._closed = False

    def answer(
        self, request: bytes, label: str, *, tries: int = MAX_TRIES
    ) -> DecoderReply | BadSample:
        """Return the answer to a request, or why there is none.

        Args:
          label: how messages call the request.
          tries: fresh processes that may die of it.

        Raises:
          RuntimeError: an error of the program itself, or it is closed meanwhile.
        """
        for n_left in reversed(range(tries)):
            process = self._process(new=n_left < tries - 1)
            try:
                process.channel.send_bytes(request)
                reply = receive_reply(process.channel, self._timeout_s)
            except (OSError, EOFError) as e:  # it hangs, or has died
                ended = self._end(process)
                if (isinstance(e, TimeoutError) or not n_left) and not self._closed:
                    return BadSample(f"{label}: {self._describe_failure(e, ended)}")
                continue
            if reply.retires:
                self._end(process)
            else:
                self._idle.append(process)
            if reply.fault:
                raise RuntimeError(f"{label}: {reply.fault}")
            for warning in reply.warnings:
                logger.warning("%s", warning)
            return BadSample(reply.reason) if reply.reason else reply
        raise RuntimeError("the decoder is closed")

    def kill(self) -> None:
        """End the processes at once; pending requests raise RuntimeError."""
        self._closed = True
        if (server := self._server) is not None:
            server.kill()  # its decoders die with it

    def close(self) -> None:
        """End the processes, after the last request."""
        self.kill()
        with self._lock:
            self._end_server()
            self._idle.clear()

    def _describe_failure(self, error: Exception, ended: str) -> str:
        if isinstance(error, TimeoutError):
            return f"not decoded within data.sample_timeout_s={self._timeout_s:g}"
        return (
            f"decoding it ended the process ({ended}), within "
            f"data.sample_memory_bytes={self._memory_bytes:g}"
        )

    def _process(self, *, new: bool) -> DecoderProcess:
        """Return a process that nobody asks at present; an old one may have died meanwhile."""
        with suppress(IndexError):  # others take from the list, too
            if not new:
                return self._idle.pop()
        return self._start()

    def _start(self) -> DecoderProcess:
        """Return a fresh decoder. RuntimeError: the source cannot be opened, or it was closed."""
        with self._lock:
            for _ in range(MAX_TRIES):
                server = self._begin_server()
                ours, theirs = Pipe()
                with theirs, suppress(OSError, EOFError):
                    self._control.send(0)
                    send_handle(self._control, theirs.fileno(), server.pid)
                    return DecoderProcess(self._control.recv(), ours)
                self._end_server()
        raise RuntimeError("the process that starts decoders dies; see its messages above")

    def _end(self, process: DecoderProcess) -> str:
        """End a decoder and return how it ended."""
        process.channel.close()
        with self._lock, suppress(OSError, EOFError):
            if self._server is not None:
                self._control.send(process.pid)
                return self._control.recv()
        return "with its parent"

    def _begin_server(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise RuntimeError("the decoder is closed")
        if self._server is not None:
            return self._server
        self._control, theirs = Pipe()
        with theirs:
            self._server = subprocess.Popen(
                [*child_command("dflop_jax.data.pool.fork_server_main"), str(theirs.fileno())],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
                env={**os.environ, **ENVIRONMENT},
            )  # fmt: skip
        try:
            self._control.send((self._factory, self._memory_bytes))
            error = self._control.recv()
        except (OSError, EOFError):
            self._end_server()
            raise RuntimeError("the process that starts decoders has died") from None
        if error:
            self._end_server()
            raise RuntimeError(f"a decoding process cannot open the data: {error}")
        return self._server

    def _end_server(self) -> None:
        if self._server is not None:
            self._control.close()
            self._server.kill()
            self._server.wait()
            self._server = None


@dataclass(frozen=True)
class DecoderReply:
    """What a decoder answers: a sample or the reason why there is none; or rows of an index, or the
    reason why there are none, for several records. `fault`: a traceback, of an error of the program
    itself. `warnings`: what was logged. `retires`: the process has grown and ends after this
    reply."""

    sample: Sample | None = None
    rows: tuple[IndexRow | BadSample, ...] = ()
    reason: str = ""
    fault: str = ""
    warnings: tuple[str, ...] = ()
    retires: bool = False


def send_reply(channel: Connection, reply: DecoderReply) -> None:
    """Send a reply; its arrays are in an unnamed file, which the receiver maps."""
    with _nameless_file() as file:

        def write_array(array: np.ndarray) -> tuple[str, tuple[int, ...], int]:
            if array.dtype.kind not in "biuf":
                raise TypeError(f"a field of dtype {array.dtype} cannot be sent")
            offset = file.seek((file.tell() // ALIGNMENT_BYTES + 1) * ALIGNMENT_BYTES)
            file.write(np.ascontiguousarray(array).data)
            return array.dtype.str, array.shape, offset

        channel.send_bytes(msgspec.msgpack.encode(reply, enc_hook=write_array))
        if file.tell():
            file.truncate()
            send_handle(channel, file.fileno(), 0)


def receive_reply(channel: Connection, timeout_s: float) -> DecoderReply:
    """Return the next reply. TimeoutError after `timeout_s`; EOFError or OSError where the sender
    ends before."""
    if not channel.poll(timeout_s):
        raise TimeoutError
    data = channel.recv_bytes()

    @cache
    def segment() -> mmap.mmap:
        file = recv_handle(channel)
        try:
            return mmap.mmap(file, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(file)

    def array(_: type, location: tuple[str, tuple[int, ...], int]) -> np.ndarray:
        dtype, shape, offset = location
        return np.ndarray(shape, dtype, segment(), offset)

    return msgspec.msgpack.decode(data, type=DecoderReply, dec_hook=array)


def _nameless_file() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("dflop-sample"), "r+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)
