"""The ports that jax itself opens: where they listen, and that they close once they have served.

jax believes whoever connects, and what a stranger sends to the port of its transfers ends the
process (`Implement: ...`, jaxlib 0.10.2). So these ports are bound to the one interface that the
run needs. Those of transfers between processes on the CPU are needed only until every two processes
have a connection; then the kernel is told to drop what else arrives there. Gloo's ports have to
stay open, since it connects each group of devices when that group first computes.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import logging
import os
import resource
import socket
import stat
import struct
import sys
from collections.abc import Container, Sequence
from contextlib import suppress
from pathlib import Path

import jax
import numpy as np
from jax._src import distributed as jax_distributed
from jax._src import xla_bridge
from jax._src.lib import _jax
from jax.sharding import SingleDeviceSharding

from dflop_jax.cluster.addresses import LOOPBACK, Address, free_port

MANY_DESCRIPTORS = 1 << 16

# Linux's numbers, which Python's socket module lacks.
_SO_ATTACH_FILTER, _SO_MEMINFO, _MEMINFO_DROPS = 26, 55, 8
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # one instruction: accept 0 bytes of a packet
_TCP_LISTEN = 10
_OWN_DESCRIPTORS = Path("/proc/self/fd")

log = logging.getLogger("dflop_jax")

# ---- before jax starts ----


def bind_transfers(own_host: str) -> None:
    """Have jax's transfers between processes on the CPU listen at `own_host` only."""
    at = str(Address(own_host, free_port()))
    jax.config.update("jax_cross_host_transfer_socket_address", at)
    jax.config.update("jax_cross_host_transport_addresses", f"{at.rpartition(':')[0]}:0")


def bind_nccl(own_host: str) -> None:
    """Have NCCL listen on loopback where all processes are on this host, unless told otherwise."""
    if own_host == LOOPBACK:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def bind_gloo(own_host: str) -> None:
    """Have gloo listen at `own_host`, not where this host's name leads; jax is connected by now."""
    if jax.config.jax_cpu_collectives_implementation != "gloo":  # type: ignore[attr-defined]
        return
    collectives = _jax.make_gloo_tcp_collectives(
        distributed_client=jax_distributed.global_state.client, hostname=own_host
    )
    make = functools.partial(xla_bridge.make_cpu_client, collectives)
    cpu = xla_bridge._backend_factories["cpu"]
    xla_bridge._backend_factories["cpu"] = dataclasses.replace(cpu, factory=make)


def allow_many_descriptors() -> None:
    """Let this process hold as many connections as the system permits.

    Gloo keeps what strangers have opened and ends the process when it cannot accept any more.
    """
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MANY_DESCRIPTORS if most == resource.RLIM_INFINITY else min(most, MANY_DESCRIPTORS)
    if now != resource.RLIM_INFINITY and now < wanted:
        with suppress(ValueError, OSError):  # a system that permits less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


# ---- when jax has started ----


def connect_pairs(devices: Sequence[jax.Device], timeout_s: float) -> None:
    """Have jax connect every two processes for transfers, both ways; all of them call this.

    A process listens from the first array that it sends, and who looks for it before that looks
    again only after 2 s. So each sends before the others receive. jax counts transfers, hence
    every process takes part in every one, also where it neither sends nor receives.
    """
    client, here = jax_distributed.global_state.client, jax.process_index()
    assert client is not None
    firsts = {d.process_index: d for d in reversed(devices)}
    arrived = []
    for source in sorted(firsts):
        if source != here:
            client.wait_at_barrier(f"dflop_jax/sent/{source}", int(1000 * timeout_s))
        own = np.zeros(1, np.float32)
        sent = jax.make_array_from_single_device_arrays(
            (1,),
            SingleDeviceSharding(firsts[source]),
            [jax.device_put(own, firsts[source])] if source == here else [],
            dtype=own.dtype,
        )
        for target in sorted(firsts.keys() - {source}):
            arrived.append(jax.device_put(sent, SingleDeviceSharding(firsts[target])))
        if source == here:
            client.wait_at_barrier(f"dflop_jax/sent/{source}", int(1000 * timeout_s))
    jax.block_until_ready(arrived)
    client.wait_at_barrier("dflop_jax/arrived", int(1000 * timeout_s))


def listening_ids() -> set[int]:
    """What tells this process's listening TCP sockets apart from those it opens later."""
    socks = listening()
    for sock in socks.values():
        sock.close()
    return set(socks)


def listening(apart_from: Container[int] = ()) -> dict[int, socket.socket]:
    """Copies of this process's listening TCP sockets; none where the system does not show them."""
    found: dict[int, socket.socket] = {}
    if not (sys.platform == "linux" and _OWN_DESCRIPTORS.exists()):
        return found
    for name in os.listdir(_OWN_DESCRIPTORS):
        with suppress(OSError):  # closed meanwhile
            file = os.fstat(int(name))
            if not stat.S_ISSOCK(file.st_mode):
                continue
            sock = socket.socket(fileno=os.dup(int(name)))
            if file.st_ino not in apart_from and file.st_ino not in found and _listens(sock):
                found[file.st_ino] = sock
            else:
                sock.close()
    return found


def _listens(sock: socket.socket) -> bool:
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
        return False
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_LISTEN


class ClosedPorts:
    """Listening sockets at which no connection arrives any more; those that exist go on."""

    def __init__(self, socks: Sequence[socket.socket]) -> None:
        self._socks = list(socks)
        code = ctypes.create_string_buffer(_DROP_ALL)
        program = struct.pack("HL", 1, ctypes.addressof(code))
        try:
            for sock in self._socks:
                sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
        except OSError as e:  # a system that only looks like Linux
            log.warning("jax's ports stay open to strangers: %s", e.strerror)

    def dropped(self) -> int:
        """Packets of strangers that were dropped; a connection tries with more than one."""
        total = 0
        for sock in self._socks:
            size = 4 * (_MEMINFO_DROPS + 1)
            with suppress(OSError):
                about = sock.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, size)
                total += struct.unpack(f"{len(about) // 4}I", about)[_MEMINFO_DROPS]
        return total
