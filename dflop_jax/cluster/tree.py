"""Who is connected to whom in a run of many processes: a tree in which nobody has many children.

Once all have met (`rendezvous`), each process is connected to process 0, which would then have to
send thousands of messages for everything that it shares. So those that are to have children listen
on a port of their own, process 0 tells the others where, and these connect there, with the proof of
the run's secret that the first meeting asked for, in place of their connection to process 0.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing

from dflop_jax.cluster.addresses import Address, free_port, reached_at
from dflop_jax.cluster.door import LOOK_S, Door, listen
from dflop_jax.cluster.ending import TryAgain
from dflop_jax.cluster.handshake import Refused, introduce
from dflop_jax.cluster.links import receive_message, send_at_once, send_message

FAN_OUT = 32  # children of a process at most: 1,024 processes are two levels below process 0
BRANCH_S = 60.0  # in which all are connected as the tree is; all of them run by then


def parent_of(process: int, fan_out: int = FAN_OUT) -> int:
    """The parent of any process but 0."""
    return (process - 1) // fan_out


def children_of(process: int, number: int, fan_out: int = FAN_OUT) -> range:
    """The children of a process of `number`."""
    first = process * fan_out + 1
    return range(min(first, number), min(first + fan_out, number))


def branch(
    links: Mapping[int, socket.socket],
    own_host: str,
    index: int,
    number: int,
    secret: bytes,
    fan_out: int = FAN_OUT,
) -> dict[int, socket.socket]:
    """Connections to parent and children, in place of `links` between process 0 and every other.

    Args:
      own_host: where others reach this process's host.

    Raises:
      TryAgain: a process has gone, or does not come within `BRANCH_S`.
    """
    if number <= fan_out + 1:
        return dict(links)
    deadline = time.monotonic() + BRANCH_S
    try:
        with ExitStack() as stack:
            for sock in links.values():
                stack.callback(sock.close)
            if index == 0:
                ours = _tell_parents(links, own_host, number, fan_out, deadline)
            else:
                children = children_of(index, number, fan_out)
                ours = _branch_below(links[0], own_host, index, children, fan_out, secret, deadline)
            stack.pop_all()
    except TimeoutError:
        raise TryAgain(
            f"process {index} was not connected to others in {BRANCH_S:g} s: start again"
        ) from None
    except OSError as e:
        raise TryAgain(
            f"process {index} lost another while they met ({e.strerror or e}): start again"
        ) from None
    for process, sock in links.items():
        if process not in ours or ours[process] is not sock:
            sock.close()
    for sock in ours.values():
        send_at_once(sock)
        sock.settimeout(None)
    return ours


def _branch_below(
    up: socket.socket,
    own_host: str,
    index: int,
    children: range,
    fan_out: int,
    secret: bytes,
    deadline: float,
) -> dict[int, socket.socket]:
    """As one of the others: connect to the parent, then let the children in."""
    parent = parent_of(index, fan_out)
    if not children:
        return {parent: _follow(up, index, parent, secret, deadline)}
    here = Address(own_host, free_port())
    with listen(here) as listener, ExitStack() as stack:
        send_message(up, "port", str(here.port).encode())
        above = _follow(up, index, parent, secret, deadline)
        stack.callback(above.close)
        below = _admit(listener, children, secret, deadline)
        stack.pop_all()
    return {parent: above, **below}


def _tell_parents(
    links: Mapping[int, socket.socket], own_host: str, number: int, fan_out: int, deadline: float
) -> dict[int, socket.socket]:
    """As process 0: where each process finds its parent; the connections that stay."""
    at = {}
    for p, sock in links.items():
        if children_of(p, number, fan_out):
            port = int(receive_message(sock, deadline)[1])
            at[p] = str(Address(reached_at(sock, own_host), port))
    for p, sock in links.items():
        parent = parent_of(p, fan_out)
        send_message(sock, "parent", at[parent].encode() if parent else b"")
    return {p: links[p] for p in children_of(0, number, fan_out)}


def _follow(
    up: socket.socket, index: int, parent: int, secret: bytes, deadline: float
) -> socket.socket:
    """The connection to this process's parent, once process 0 has said where that is."""
    where = receive_message(up, deadline)[1].decode()
    if not where:
        return up
    address = Address.parse(where)
    left_s = max(1e-3, deadline - time.monotonic())
    sock = socket.create_connection((address.host, address.port), left_s)
    try:
        introduce(sock, secret, json.dumps({"index": index}).encode(), deadline)
    except (Refused, OSError) as e:
        sock.close()
        why = f"process {parent} at {address} does not let process {index} in: {e}"
        raise TryAgain(why) from None
    return sock


def _admit(
    listener: socket.socket, children: range, secret: bytes, deadline: float
) -> dict[int, socket.socket]:
    """The connections of all children, which come and prove the secret."""
    came: dict[int, socket.socket] = {}
    with closing(Door(listener, secret)) as door, ExitStack() as stack:
        while len(came) < len(children):
            if time.monotonic() > deadline:
                raise TimeoutError
            door.accept(LOOK_S)
            for guest in door.guests():
                index = json.loads(guest.hello).get("index")
                if index in children and index not in came:
                    came[index] = guest.sock
                    stack.callback(guest.sock.close)
                else:
                    guest.sock.close()
        stack.pop_all()
    return dict(sorted(came.items()))
