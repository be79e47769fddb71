"""What the agents of hosts say to each other before a start, and whether those there go on."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from dflop_jax.cluster.links import receive_message, send_message

# What who gathers says: they go on together, they still wait, no, or come again.
GO, WAIT, NO, AGAIN = "go", "wait", "no", "again"
SIGN_S = 2.0  # between two signs that somebody is still waited for
SILENT_S = 30.0  # without any of them, who gathers is gone
TAKE_S = 1.0  # longest wait for the other end to take a word


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent says of itself when it comes.

    Attributes:
      host: its number; hosts: how many the run is started on.
      what: versions, which have to be equal.
      processes: that it starts.
      start: the last one that it took part in; 0: none.
      begun: it knows the run's folder.
      last: hosts of that start and those that were waiting to be taken in, as bits of a
        hexadecimal number.
    """

    host: int
    hosts: int
    what: str
    processes: int
    start: int = 0
    begun: bool = False
    last: str = "0"


def bits_of(hosts: Sequence[int]) -> str:
    """Numbers of hosts as `Card.last` has them."""
    return f"{sum(1 << h for h in hosts):x}"


def is_enough(cards: Sequence[Card], least: int, waited: bool) -> bool:
    """Whether those who have come go on.

    Args:
      least: processes that the run goes on with; 0: with all hosts only.
      waited: the others had their time.
    """
    knows_most = max(cards, key=lambda c: c.start)
    came = sum(1 << c.host for c in cards)
    if len(cards) == knows_most.hosts:
        return True
    # Before the run has opened its folder nothing keeps two sides of a partition apart.
    if not (least and knows_most.begun) or sum(c.processes for c in cards) < least:
        return False
    last = int(knows_most.last, 16)
    return waited or (last != 0 and last & ~came == 0)


def disagreement(ours: Card, theirs: Card) -> str:
    """Why a host cannot take part; "" when it can."""
    for name, says in (("hosts", "the number of hosts is"), ("what", "it runs")):
        mine, other = getattr(ours, name), getattr(theirs, name)
        if mine != other:
            return (
                f"host {theirs.host} says {says} {other}, host {ours.host} says {mine}; start all "
                "alike"
            )
    return ""


def two_of(host: int) -> str:
    return f"two launchers say they are host {host}; give each its own --host"


def say(sock: socket.socket, word: str, text: str = "") -> None:
    """Say one thing; who is gone is noticed by the reader."""
    with suppress(OSError):
        sock.settimeout(TAKE_S)
        send_message(sock, word, text.encode())


def hear(sock: socket.socket, deadline: float) -> tuple[str, str]:
    word, text = receive_message(sock, deadline)
    return word, text.decode()
