"""The process that opens a source once and forks decoders of it; it never imports JAX.

A decoder shares the source's memory with it and starts in milliseconds, so that one may be killed
at any time: past its deadline, or by what it decodes. It has one thread and no locks to inherit.
Started by `processes.ForkServer`. It ends, and its decoders with it, when its parent does.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import logging
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

import msgspec

from dflop_jax.children import ignore_signals
from dflop_jax.data.decoder import BadSample, sample_of
from dflop_jax.data.pool.messages import (
    DecoderReply,
    DecoderSetup,
    ForkAnswer,
    ForkOrder,
    SharedSegment,
)
from dflop_jax.data.sample import Source

PDEATHSIG = 1  # of prctl(2)
RETIRING_PART = 4  # a decoder retires when it keeps its limit of memory over this number
MAX_WARNINGS = 20  # that are passed on of one sample


def main() -> None:
    ignore_signals()
    control = socket.socket(fileno=int(sys.argv[1]))
    lines = control.makefile("rb")
    setup = msgspec.json.decode(lines.readline(), type=DecoderSetup)
    logging.getLogger().addHandler(logging.NullHandler())  # the parent has opened it, and said so
    try:
        module, _, function = setup.opens.partition(":")
        source = getattr(importlib.import_module(module), function)(setup.arguments)
    except Exception:
        _send(control, ForkAnswer(error=traceback.format_exc()))
        return
    answer = source if callable(source) else partial(_decoded, source)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    gc.collect()
    gc.freeze()  # or the first collection of a decoder would copy all of it
    _send(control, ForkAnswer())
    decoders: set[int] = set()
    try:
        # a socket comes with the order, so the order is not read by `lines`
        while True:
            data, files, _, _ = socket.recv_fds(control, 4096, 1)
            if not data:
                return
            order = msgspec.json.decode(data, type=ForkOrder)
            if order.end:
                known = order.end in decoders  # else one of a process like this that has died
                decoders.discard(order.end)
                _send(control, ForkAnswer(ended=_ended(order.end) if known else "with its parent"))
                continue
            channel = socket.socket(fileno=files[0])
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    control.close()
                    _end_with(parent)
                    _serve(answer, channel, setup.memory_bytes)
                    status = 0
                finally:
                    os._exit(status)  # nothing of the parent's is to run
            channel.close()
            decoders.add(pid)
            _send(control, ForkAnswer(pid=pid))
    finally:
        for pid in decoders:
            _ended(pid)


def _ended(pid: int) -> str:
    """End a decoder and say how it ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # no effect on one that has ended but was not waited for
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return f"signal {os.WTERMSIG(status)}"
    return f"exit {os.WEXITSTATUS(status)}"


def _end_with(parent: int) -> None:
    """Have this process end when its parent does; the parent may have ended before it was asked."""
    with suppress(AttributeError, OSError):  # Linux alone
        ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _serve(
    answer: Callable[[bytes, SharedSegment], DecoderReply],
    channel: socket.socket,
    memory_bytes: int,
) -> None:
    """Answer what is asked for, until the parent closes the channel."""
    start_bytes = _data_bytes()
    if start_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (start_bytes + memory_bytes,) * 2)
    warnings = _Collected()
    logging.getLogger("dflop_jax").addHandler(warnings)
    segment = SharedSegment()
    for line in channel.makefile("rb"):
        try:
            reply = answer(line, segment)
        except Exception:
            reply = DecoderReply(fault=traceback.format_exc())
        grown = _data_bytes() - start_bytes > memory_bytes / RETIRING_PART
        said, is_new = warnings.taken(), segment.is_new
        reply = replace(reply, warnings=said, new_segment=is_new, retires=grown)
        _send(channel, reply, segment.file if is_new else -1)
        segment.is_new = False
        if grown:
            return


def _decoded(source: Source, line: bytes, segment: SharedSegment) -> DecoderReply:
    decoded = sample_of(source, int(line))
    if isinstance(decoded, BadSample):
        return DecoderReply(reason=decoded.reason)
    return DecoderReply(segment.write(decoded), decoded.load)


def _data_bytes() -> int:
    """What RLIMIT_DATA counts of this process; 0 where nothing says."""
    with suppress(OSError), open("/proc/self/statm", "rb", buffering=0) as file:
        return int(file.read().split()[5]) * resource.getpagesize()
    return 0


class _Collected(logging.Handler):
    """Keeps what is logged for the parent to log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._messages = [*self._messages, record.getMessage()][:MAX_WARNINGS]

    def taken(self) -> tuple[str, ...]:
        messages, self._messages = tuple(self._messages), []
        return messages


def _send(channel: socket.socket, message: ForkAnswer | DecoderReply, file: int = -1) -> None:
    data = msgspec.json.encode(message) + b"\n"
    sent = socket.send_fds(channel, [data], [file] if file >= 0 else [])
    channel.sendall(data[sent:])
