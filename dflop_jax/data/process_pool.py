"""Decoding in processes that can be killed: a deadline and a memory limit for every sample.

A server process opens the source once and forks decoders. A decoder shares the source's memory,
starts in milliseconds and may be killed at any time. If a decoder dies, a fresh one tries the
sample once more, since the cause may be another one; a sample that kills both is bad. The server
and the decoders never import JAX, have one thread and no locks, and end with their parent.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import logging
import math
import mmap
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from logging.handlers import BufferingHandler
from multiprocessing.connection import Connection, Pipe
from multiprocessing.context import ForkProcess
from multiprocessing.reduction import recv_handle, send_handle
from typing import NamedTuple

import msgspec
import numpy as np

from dflop_jax.child_processes import child_command, ignore_signals
from dflop_jax.data.bounds import MAX_EXAMPLES
from dflop_jax.data.datasets.record_table import IndexRow
from dflop_jax.data.decoder import BadSample, DecodeResult, ThreadDecoder, check_load, try_sample
from dflop_jax.data.sample import Sample, Source, SourceFactory

# One thread per process: the user sets the number of processes, and threads do not survive a fork.
# Arrow's own allocators reserve 1 GiB at once, which would count as memory of the sample.
ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
}
MAX_TRIES = 2  # for a sample whose process dies
PDEATHSIG = 1  # PR_SET_PDEATHSIG of prctl(2)
RETIRE_DIVISOR = 4  # a decoder retires if it keeps more than its memory limit divided by this
logger = logging.getLogger("dflop_jax.data")


@dataclass(frozen=True)
class DecoderReply:
    """Answer of a decoder: a sample or rows of an index, or the reason for having none."""

    sample: Sample | None = None
    rows: tuple[IndexRow | BadSample, ...] = ()
    reason: str = ""
    fault: str = ""  # traceback of an error of the program itself
    warnings: tuple[str, ...] = ()
    retires: bool = False  # the process has grown and ends after this reply


def make_decoder(
    source: Source, workers: int, timeout_s: float, memory_bytes: int
) -> ThreadDecoder:
    """Return a decoder with processes if the source has a `factory`, else with threads."""
    if getattr(source, "factory", None) is None or not hasattr(os, "fork"):
        return ThreadDecoder(source, workers)
    return ProcessDecoder(source, workers, timeout_s, memory_bytes)


class ProcessDecoder(ThreadDecoder):
    """Decodes in `workers` processes with a thread for each; for the limits see `DecoderPool`."""

    def __init__(self, source: Source, workers: int, timeout_s: float, memory_bytes: int) -> None:
        super().__init__(source, workers)
        self._pool_of_processes = DecoderPool(source.factory, timeout_s, memory_bytes)  # type: ignore[attr-defined]

    def close(self) -> None:
        """End the processes, even while they decode."""
        self._pool_of_processes.close()
        super().close()

    def _decode(self, index: int) -> DecodeResult:
        answer = self._pool_of_processes.answer(b"%d" % index, self._source.label(index))
        decoded = answer if isinstance(answer, BadSample) else answer.sample
        assert decoded is not None
        return check_load(self._source, index, decoded)


class DecoderProcess(NamedTuple):
    pid: int
    channel: Connection


class DecoderPool:
    """Processes that answer requests, one for each pending request. The server that forks them is
    started again if it dies.

    Args:
      factory: opens a source, whose samples are requested by number, or returns a function from a
        request to its `DecoderReply`.
      timeout_s: maximum seconds per answer.
      memory_bytes: maximum bytes that an answer may allocate in addition to the source.
    """

    def __init__(self, factory: SourceFactory, timeout_s: float, memory_bytes: int) -> None:
        self._factory, self._timeout_s, self._memory_bytes = factory, timeout_s, memory_bytes
        self._lock = threading.Lock()  # for the server and its control connection
        self._server: subprocess.Popen[bytes] | None = None
        self._control: Connection
        self._idle: list[DecoderProcess] = []
        self._closed = False

    def answer(
        self, request: bytes, label: str, *, tries: int = MAX_TRIES
    ) -> DecoderReply | BadSample:
        """Return the answer to a request, or a `BadSample` with the reason for having none.

        Args:
          label: name of the request in messages.
          tries: number of processes that may die before the request is given up.

        Raises:
          RuntimeError: an error of the program itself, or the pool is closed meanwhile.
        """
        for n_left in reversed(range(tries)):
            process = self._process(new=n_left < tries - 1)
            try:
                process.channel.send_bytes(request)
                reply = receive_reply(process.channel, self._timeout_s)
            except (OSError, EOFError) as e:  # it hangs, or has died
                exit_text = self._end(process)
                if self._closed or (n_left and not isinstance(e, TimeoutError)):
                    continue
                reason = f"not decoded within data.sample_timeout_s={self._timeout_s:g}"
                if not isinstance(e, TimeoutError):
                    limit = f"data.sample_memory_bytes={self._memory_bytes:g}"
                    reason = f"its decoding process died ({exit_text}) under {limit}"
                return BadSample(f"{label}: {reason}")
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

    def close(self) -> None:
        """End the processes at once; pending requests raise RuntimeError."""
        self._closed = True
        if (server := self._server) is not None:
            server.kill()  # its decoders die with it, and threads that wait release the lock
        with self._lock:
            self._end_server()
            self._idle.clear()

    def _process(self, *, new: bool) -> DecoderProcess:
        """Return an idle process, which may have died meanwhile, or a new one."""
        with suppress(IndexError):  # other threads take from the list, too
            if not new:
                return self._idle.pop()
        with self._lock:
            for _ in range(MAX_TRIES):
                server = self._start_server()
                ours, theirs = Pipe()
                with theirs, suppress(OSError, EOFError):
                    self._control.send(0)
                    send_handle(self._control, theirs.fileno(), server.pid)
                    return DecoderProcess(self._control.recv(), ours)
                self._end_server()
        raise RuntimeError("the process that starts decoders keeps dying; see its messages above")

    def _end(self, process: DecoderProcess) -> str:
        """End a decoder and return its signal or exit code as text."""
        process.channel.close()
        with self._lock, suppress(OSError, EOFError):
            if self._server is not None:
                self._control.send(process.pid)
                return self._control.recv()
        return "with its parent"

    def _start_server(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise RuntimeError("the decoder is closed")
        if self._server is not None:
            return self._server
        self._control, theirs = Pipe()
        with theirs:
            self._server = subprocess.Popen(
                [*child_command(__name__), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **ENVIRONMENT},
            )
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


def send_reply(channel: Connection, reply: DecoderReply) -> None:
    """Send a reply. Its arrays are sent in an unnamed file that the receiver maps."""
    with (
        open(os.memfd_create("dflop-sample"), "r+b", buffering=0)
        if hasattr(os, "memfd_create")
        else tempfile.TemporaryFile(buffering=0)
    ) as file:

        def write_array(array: np.ndarray) -> tuple[str, tuple[int, ...], int]:
            if array.dtype.kind not in "biuf":
                raise TypeError(f"a field of dtype {array.dtype} cannot be sent")
            offset = file.seek((file.tell() // mmap.PAGESIZE + 1) * mmap.PAGESIZE)
            file.write(np.ascontiguousarray(array).data)
            return array.dtype.str, array.shape, offset

        channel.send_bytes(msgspec.msgpack.encode(reply, enc_hook=write_array))
        if file.tell():
            file.truncate()
            send_handle(channel, file.fileno(), 0)


def receive_reply(channel: Connection, timeout_s: float) -> DecoderReply:
    """Return the next reply. TimeoutError: it is late; EOFError, OSError: the sender has died."""
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


def main() -> None:
    """Run the server. For each 0 received, fork a decoder on the connection that follows; for a
    process id, end that decoder."""
    ignore_signals()
    control = Connection(int(sys.argv[1]))
    factory, memory_bytes = control.recv()
    logging.getLogger().addHandler(logging.NullHandler())  # the parent has logged what opening logs
    try:
        module, _, function = factory.function.partition(":")
        source = getattr(importlib.import_module(module), function)(factory.arguments)
    except Exception:
        control.send(traceback.format_exc())
        return

    def decode_sample(request: bytes) -> DecoderReply:
        decoded = try_sample(source, int(request))
        if isinstance(decoded, BadSample):
            return DecoderReply(reason=decoded.reason)
        return DecoderReply(decoded)

    answer = source if callable(source) else decode_sample
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    gc.collect()
    gc.freeze()  # else the first collection of a decoder would copy all objects
    control.send("")
    fork = multiprocessing.get_context("fork")
    decoders: dict[int, ForkProcess] = {}
    try:
        while True:
            if pid := control.recv():
                decoder = decoders.pop(pid, None)  # None: an earlier server's decoder
                control.send(_end_decoder(decoder) if decoder else "with its parent")
                continue
            with Connection(recv_handle(control)) as channel:
                process = fork.Process(target=_serve, args=(answer, channel, control, memory_bytes))
                process.start()
            assert process.pid is not None
            decoders[process.pid] = process
            control.send(process.pid)
    except EOFError:
        return
    finally:
        for process in decoders.values():
            _end_decoder(process)


def _end_decoder(process: ForkProcess) -> str:
    """End a decoder and return its signal or exit code as text."""
    process.kill()  # no effect if it has ended
    process.join()
    code = process.exitcode or 0
    return f"signal {-code}" if code < 0 else f"exit {code}"


def _serve(
    answer: Callable[[bytes], DecoderReply],
    channel: Connection,
    control: Connection,
    memory_bytes: int,
) -> None:
    """Answer requests until the parent closes the channel."""
    control.close()
    with suppress(AttributeError, OSError):  # only Linux has it
        ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is None or os.getppid() != parent.pid:  # it ended before prctl
        os._exit(1)
    start_bytes = _data_bytes()
    if start_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (start_bytes + memory_bytes,) * 2)
    handler = BufferingHandler(capacity=math.inf)  # type: ignore[arg-type]
    handler.setLevel(logging.WARNING)
    logging.getLogger("dflop_jax").addHandler(handler)
    reply = DecoderReply()
    with suppress(EOFError, ConnectionError):
        while not reply.retires:
            request = channel.recv_bytes()
            try:
                reply = answer(request)
            except Exception:
                reply = DecoderReply(fault=traceback.format_exc())
            grown = _data_bytes() - start_bytes > memory_bytes / RETIRE_DIVISOR
            messages = tuple(record.getMessage() for record in handler.buffer[:MAX_EXAMPLES])
            handler.flush()
            reply = replace(reply, warnings=messages, retires=grown)
            send_reply(channel, reply)


def _data_bytes() -> int:
    """Return the bytes of this process that RLIMIT_DATA limits; 0 if they are unknown."""
    with suppress(OSError), open("/proc/self/statm", "rb", buffering=0) as file:
        return int(file.read().split()[5]) * resource.getpagesize()
    return 0
