"""What a host checks of itself before its processes meet others.

A host that computes wrong, or whose disk or network hangs, costs all others a run; here it costs
itself a line, within seconds: a product, its own link, the disk of the run, its clock.
"""

from __future__ import annotations

import errno
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from dflop_jax.cluster.addresses import LOOPBACK, Address, host_of
from dflop_jax.cluster.ending import TryAgain

LIMIT_S = 4.0  # of all checks together, which go on side by side
_SIZE = 384  # rows and columns of the product: each sum is a whole number that float32 holds
_BYTES = 1 << 20  # that are sent and written
# Errors that say that a disk or a mount is broken; others (a full disk, no permission) are told by
# what needs to write.
_BROKEN = (errno.EIO, errno.ESTALE, errno.EREMOTEIO, errno.ENXIO, errno.ETIMEDOUT)
_EARLIEST_S = 1_735_689_600.0  # 2025, before this was written
_DRIFT = 0.2  # by which two clocks of a host may differ over the checks, of their length


def check_host(coordinator: Address, folder: Path) -> None:
    """Check this host.

    Args:
      coordinator: where the processes of the run are to meet.
      folder: that the run writes to; the nearest parent that exists is tried.

    Raises:
      TryAgain: one line says what fails. Another host may do.
    """
    run_checks(
        {
            "product": check_product,
            "link": lambda: check_link(own_address(coordinator)),
            "disk": lambda: check_disk(folder),
            "clock": check_clock,
        }
    )


def run_checks(checks: Mapping[str, Callable[[], str]], limit_s: float = LIMIT_S) -> None:
    """Run checks side by side, each of which returns what fails, "" where nothing does.

    Raises:
      TryAgain: one fails, or does not end within `limit_s`.
    """
    results: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()

    def run(name: str, check: Callable[[], str]) -> None:
        try:
            results.put((name, check()))
        except Exception as e:
            results.put((name, f"{type(e).__name__}: {e}"))

    for name, check in checks.items():
        threading.Thread(target=run, args=(name, check), daemon=True, name=f"check-{name}").start()
    left, deadline = set(checks), time.monotonic() + limit_s
    while left:
        try:
            name, trouble = results.get(timeout=max(deadline - time.monotonic(), 0.0))
        except queue.Empty:
            name, trouble = sorted(left)[0], f"does not end within {limit_s:g} s"
        left.discard(name)
        if trouble:
            raise TryAgain(
                f"host {socket.gethostname()} is not fit for a run: its {name} {trouble}; take "
                "it out of the run, or mend it"
            )


def check_product(multiply: Callable[[np.ndarray, np.ndarray], np.ndarray] = np.matmul) -> str:
    """A product of whole numbers in float32, against the same in integers, bit for bit."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-8, 9, (_SIZE, _SIZE)).astype(np.float32) for _ in range(2))
    wholes = a.astype(np.int64), b.astype(np.int64)
    if (multiply(a, b) != np.matmul(*wholes)).any():
        return f"of two {_SIZE} x {_SIZE} matrices of whole numbers is wrong"
    return ""


def own_address(coordinator: Address) -> str:
    """The address of this host on the way to the coordinator; loopback where nobody can tell."""
    try:
        where = (coordinator.host, coordinator.port)
        family, _, _, _, to = socket.getaddrinfo(*where, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(to)  # sends nothing
            return host_of(probe.getsockname())
    except OSError:  # the name may not be there yet; who meets has more patience
        return LOOPBACK


def check_link(address: str) -> str:
    """A MiB to this host's own address and back to itself."""
    data = np.random.default_rng(1).bytes(_BYTES)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as server:
        server.settimeout(LIMIT_S)
        with socket.create_connection(server.getsockname()[:2], timeout=LIMIT_S) as out:
            arriving, _ = server.accept()
            with arriving:
                threading.Thread(target=_send, args=(out, data), daemon=True).start()
                arriving.settimeout(LIMIT_S)
                arrived = bytearray()
                while len(arrived) < len(data) and (more := arriving.recv(_BYTES)):
                    arrived += more
    return "" if arrived == data else f"to its own address {address} loses or changes bytes"


def _send(sock: socket.socket, data: bytes) -> None:
    try:
        sock.sendall(data)
    except OSError:  # who receives notices
        return


def check_disk(folder: Path) -> str:
    """A MiB that is written, flushed and read again."""
    place = next(f for f in (folder.absolute(), *folder.absolute().parents) if f.is_dir())
    data = np.random.default_rng(2).bytes(_BYTES)
    file = place / f".dflop-check-{socket.gethostname()}-{os.getpid()}"
    try:
        try:
            with file.open("w+b") as f:
                f.write(data)
                f.flush()
                os.fsync(f.fileno())
                f.seek(0)
                if f.read() != data:
                    return f"at {place} gives back other bytes than were written"
        finally:
            file.unlink(missing_ok=True)
    except OSError as e:
        return f"at {place} fails ({e.strerror})" if e.errno in _BROKEN else ""
    return ""


def check_clock(
    now_s: Callable[[], float] = time.time,
    steady_s: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> str:
    """Whether it says a time that can be, and goes as fast as the one that nobody sets."""
    before_s, begun_s, after_s = steady_s(), now_s(), steady_s()
    pause(0.1)
    least_s, passed_s, most_s = steady_s() - after_s, now_s() - begun_s, steady_s() - before_s
    if begun_s < _EARLIEST_S:
        return f"says {time.strftime('%Y-%m-%d', time.gmtime(begun_s))}, which is long past"
    if not (1 - _DRIFT) * least_s <= passed_s <= (1 + _DRIFT) * most_s:
        return f"advanced by {passed_s:.2f} s in {most_s:.2f} s"
    return ""
