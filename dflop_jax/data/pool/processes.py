"""Decoding in processes that can be killed: a deadline and a memory limit for every sample.

A sample that its process does not survive is a bad one. Deaths are looked at twice, each time in a
fresh process, since others may kill a process too.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from typing import TypeVar

import msgspec

from dflop_jax.children import command
from dflop_jax.data.decoder import BadSample, Decoded, Decoder, Modules, ThreadDecoder, checked
from dflop_jax.data.pool.messages import (
    MAX_LINE,
    DecoderReply,
    DecoderSetup,
    ForkAnswer,
    ForkOrder,
    mapped,
    received,
)
from dflop_jax.data.sample import Source

# One thread each: there are as many processes as the user wants, and threads do not survive a fork.
# Arrow's own allocators reserve 1 GiB at once, which would count as what a sample takes.
ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
               "TOKENIZERS_PARALLELISM": "false",
               "ARROW_DEFAULT_MEMORY_POOL": "system"}  # fmt: skip
TRIES = 2  # of a sample whose process dies
T = TypeVar("T")
logger = logging.getLogger("dflop_jax.data")


def make_decoder(source: Source, workers: int, timeout_s: float, memory_bytes: int) -> Decoder:
    """Return what decodes a source: processes where it says how others open it (`sample.OpenedBy`),
    else threads, as of drawn scenes."""
    if getattr(source, "opened_by", None) is None or not hasattr(os, "fork"):
        return ThreadDecoder(source, workers)
    return ProcessDecoder(source, workers, timeout_s, memory_bytes)


class ProcessDecoder:
    """Decodes in `workers` processes; see `decoder.Decoder`.

    Args:
      source: its `opened_by` says how another process opens it (see `sample.OpenedBy`).
      timeout_s: seconds that a sample may take.
      memory_bytes: what decoding a sample may allocate, beyond what the source takes.
    """

    def __init__(self, source: Source, workers: int, timeout_s: float, memory_bytes: int) -> None:
        how = source.opened_by  # type: ignore[attr-defined]
        self._source = source
        self._workers = Workers(
            DecoderSetup(how.function, dict(how.arguments), memory_bytes), timeout_s
        )
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="dflop-decode")

    def submit(self, index: int, modules: Modules = None) -> Future[Decoded]:
        return self._pool.submit(self._decode, index)

    def close(self) -> None:
        """End the processes, whatever they are at."""
        self._workers.kill()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._workers.close()

    def _decode(self, index: int) -> Decoded:
        decoded = self._workers.answer(b"%d" % index, self._source.label(index), _received)
        return checked(self._source, index, decoded)


def _received(reply: DecoderReply, segment: mmap.mmap | None) -> Decoded:
    return BadSample(reply.reason) if reply.reason else received(reply, segment)


class Workers:
    """Processes that answer requests: as many as are asked at once, each within its limits.

    Args:
      timeout_s: seconds that an answer may take.
    """

    def __init__(self, setup: DecoderSetup, timeout_s: float) -> None:
        self._server, self._timeout_s = ForkServer(setup), timeout_s
        self._memory_bytes = setup.memory_bytes
        self._idle: list[Process] = []

    def answer(
        self,
        request: bytes,
        label: str,
        read: Callable[[DecoderReply, mmap.mmap | None], T],
        *,
        tries: int = TRIES,
    ) -> T | BadSample:
        """Return the answer to a request's line, or why no process survived it.

        Args:
          label: how messages call the request.
          read: makes an answer of a reply and the segment that its arrays lie in; ValueError for
            a reply that none of ours gives.
          tries: fresh processes that may die of it.

        Raises:
          RuntimeError: an error of the program itself, or it is closed meanwhile.
        """
        for left in reversed(range(tries)):
            process = self._process(fresh=left < tries - 1)
            try:
                reply = process.ask(request, self._timeout_s)
                answer = read(reply, process.segment) if not reply.fault else None
            except (OSError, ValueError, msgspec.DecodeError) as e:
                # it hangs, has died, or says what none of ours says
                ended = self._server.ended(process)
                if (isinstance(e, TimeoutError) or not left) and not self._server.closed:
                    return BadSample(f"{label}: {self._why(e, ended)}")
                continue
            if reply.retires:
                self._server.ended(process)
            else:
                self._idle.append(process)
            if answer is None:
                raise RuntimeError(f"{label}: {reply.fault}")
            for warning in reply.warnings:
                logger.warning("%s", warning)
            return answer
        raise RuntimeError("the decoder is closed")

    def _process(self, *, fresh: bool) -> Process:
        """Return a process that nobody asks at present; an old one may have died meanwhile."""
        with suppress(IndexError):  # others take from the list, too
            if not fresh:
                return self._idle.pop()
        return self._server.started()

    def kill(self) -> None:
        """End the processes at once; who waits for one gets a RuntimeError."""
        self._server.kill()

    def close(self) -> None:
        """End the processes, when nobody asks any more."""
        self._server.close()

    def _why(self, error: Exception, ended: str) -> str:
        if isinstance(error, TimeoutError):
            return f"not decoded within data.sample_timeout_s={self._timeout_s:g}"
        return (
            f"decoding it ended the process ({ended}), within "
            f"data.sample_memory_bytes={self._memory_bytes:g}"
        )


class Process:
    """A decoder: where to reach it, and the segment that it writes into."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid, self._channel = pid, channel
        self.segment: mmap.mmap | None = None

    def ask(self, request: bytes, timeout_s: float) -> DecoderReply:
        """Have a request answered. TimeoutError, or OSError where the process ends meanwhile."""
        deadline_s = time.monotonic() + timeout_s
        self._channel.settimeout(timeout_s)
        self._channel.sendall(request + b"\n")
        data, files = b"", list[int]()
        try:
            while not data.endswith(b"\n"):
                self._channel.settimeout(max(0.001, deadline_s - time.monotonic()))
                part, came, _, _ = socket.recv_fds(self._channel, 1 << 16, 1)
                files += came
                data += part
                if not part or len(data) > MAX_LINE:
                    raise ConnectionError("the decoder has ended")
            reply = msgspec.json.decode(data, type=DecoderReply)
            if reply.new_segment and files:
                self.segment = mapped(files.pop())
            return reply
        finally:
            for file in files:
                os.close(file)

    def close(self) -> None:
        self._channel.close()


class ForkServer:
    """The process that forks decoders (see `fork_server_main`), begun anew when it dies."""

    def __init__(self, setup: DecoderSetup) -> None:
        self._setup = setup
        self._lock = threading.Lock()
        self.closed = False
        self._processes: set[Process] = set()
        self._child: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def started(self) -> Process:
        """Return a fresh decoder. RuntimeError: the source cannot be opened, or it was closed."""
        with self._lock:
            for _ in range(TRIES):
                self._begin()
                ours, theirs = socket.socketpair()
                with theirs, suppress(OSError, msgspec.DecodeError):
                    process = Process(self._asked(ForkOrder(), theirs).pid, ours)
                    self._processes.add(process)
                    return process
                ours.close()
                self._end()
        raise RuntimeError("the process that starts decoders dies; see its messages above")

    def ended(self, process: Process) -> str:
        """End a decoder; how it ended, or already had."""
        process.close()
        self._processes.discard(process)
        with self._lock, suppress(OSError, msgspec.DecodeError):
            if self._child is not None:
                return self._asked(ForkOrder(process.pid)).ended
        return "with its parent"

    def kill(self) -> None:
        """End it and all its decoders, at once; who waits for them sees them die."""
        self.closed = True
        if (child := self._child) is not None:
            child.kill()  # its decoders die with it

    def close(self) -> None:
        """Forget it, when nobody uses it any more."""
        self.kill()
        with self._lock:
            self._end()
        for process in self._processes:
            process.close()

    def _begin(self) -> None:
        if self.closed:
            raise RuntimeError("the decoder is closed")
        if self._child is not None:
            return
        self._control, theirs = socket.socketpair()
        served = [*command("dflop_jax.data.pool.fork_server_main"), str(theirs.fileno())]
        with theirs:
            self._child = subprocess.Popen(
                served, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
                env={**os.environ, **ENVIRONMENT},
            )  # fmt: skip
        try:
            self._control.sendall(msgspec.json.encode(asdict(self._setup)) + b"\n")
            answer = self._answer()
        except (OSError, msgspec.DecodeError):
            self._end()
            raise RuntimeError("the process that starts decoders has died") from None
        if answer.error:
            self._end()
            raise RuntimeError(f"a decoding process cannot open the data: {answer.error}")

    def _asked(self, order: ForkOrder, file: socket.socket | None = None) -> ForkAnswer:
        assert self._control is not None
        data = msgspec.json.encode(order) + b"\n"
        socket.send_fds(self._control, [data], [file.fileno()] if file else [])
        return self._answer()

    def _answer(self) -> ForkAnswer:
        assert self._control is not None
        data = b""
        while not data.endswith(b"\n"):
            part = self._control.recv(1 << 16)
            if not part:
                raise ConnectionError("it has ended")
            data += part
        return msgspec.json.decode(data, type=ForkAnswer)

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._child is not None:
            self._child.kill()
            self._child.wait()
        self._control = self._child = None
