"""The process that opens a source once and forks decoders of it; it never imports JAX.

A decoder shares the source's memory with it and starts in milliseconds, so that one may be killed
at any time: past its deadline, or by what it decodes. It has one thread and no locks to inherit.
Started by `processes.DecoderPool`. It ends, and its decoders with it, when its parent does.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import logging
import math
import multiprocessing
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from logging.handlers import BufferingHandler
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from multiprocessing.reduction import recv_handle

from dflop_jax.child_processes import ignore_signals
from dflop_jax.data.decoder import BadSample, try_sample
from dflop_jax.data.pool.processes import DecoderReply, send_reply
from dflop_jax.data.sample import Source

PDEATHSIG = 1  # of prctl(2)
RETIRE_DIVISOR = 4  # a decoder retires when it keeps its limit of memory over this number
MAX_WARNINGS = 20  # that are passed on of one sample


def main() -> None:
    """Answer the parent's orders: fork a decoder, whose channel follows (0), or end that of a
    process id and say how it ended."""
    ignore_signals()
    control = Connection(int(sys.argv[1]))
    factory, memory_bytes = control.recv()
    logging.getLogger().addHandler(logging.NullHandler())  # the parent has opened it, and said so
    try:
        module, _, function = factory.function.partition(":")
        source = getattr(importlib.import_module(module), function)(factory.arguments)
    except Exception:
        control.send(traceback.format_exc())
        return
    answer = source if callable(source) else partial(_decode_sample, source)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    gc.collect()
    gc.freeze()  # or the first collection of a decoder would copy all of it
    control.send("")
    fork = multiprocessing.get_context("fork")
    decoders: dict[int, ForkProcess] = {}
    try:
        while True:
            if pid := control.recv():
                decoder = decoders.pop(pid, None)  # None: one of a process like this that has died
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
    """End a decoder and say how it ended."""
    process.kill()  # no effect on one that has ended
    process.join()
    code = process.exitcode or 0
    return f"signal {-code}" if code < 0 else f"exit {code}"


def _end_with_parent() -> None:
    """Have this process end when its parent does; the parent may have ended before it was asked."""
    with suppress(AttributeError, OSError):  # Linux alone
        ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is None or os.getppid() != parent.pid:
        os._exit(1)


def _serve(
    answer: Callable[[bytes], DecoderReply],
    channel: Connection,
    control: Connection,
    memory_bytes: int,
) -> None:
    """Answer what is asked for, until the parent closes the channel."""
    control.close()
    _end_with_parent()
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
            messages = tuple(record.getMessage() for record in handler.buffer[:MAX_WARNINGS])
            handler.flush()
            reply = replace(reply, warnings=messages, retires=grown)
            send_reply(channel, reply)


def _decode_sample(source: Source, request: bytes) -> DecoderReply:
    decoded = try_sample(source, int(request))
    if isinstance(decoded, BadSample):
        return DecoderReply(reason=decoded.reason)
    return DecoderReply(decoded)


def _data_bytes() -> int:
    """What RLIMIT_DATA counts of this process; 0 where nothing says."""
    with suppress(OSError), open("/proc/self/statm", "rb", buffering=0) as file:
        return int(file.read().split()[5]) * resource.getpagesize()
    return 0
