"""How the agents of a run's hosts come together when some of them may be gone for good.

Every agent knows the addresses of the hosts that may be first, in the order of their numbers; each
of those listens at its own. All agents go about and ask at the others' addresses. Who asks comes to
a host of a lower number, which gathers; one of a higher number is sent away, since that one comes
by itself. So all who can reach each other end up with the lowest of them: the first. It goes on
when all hosts are there, or where the run allows for fewer, when enough are and the others were
waited for. Two sides of a partition may both get as far; see `claims` for what then decides.

While a run goes on its first host keeps its door open (`reception`): an agent that comes back waits
there until the run takes it in.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from dflop_jax.cluster.addresses import Address
from dflop_jax.cluster.cards import (
    AGAIN,
    GO,
    NO,
    SIGN_S,
    SILENT_S,
    WAIT,
    Card,
    disagreement,
    hear,
    is_enough,
    say,
    two_of,
)
from dflop_jax.cluster.door import LOOK_S, Door, Guest, listen
from dflop_jax.cluster.ending import TryAgain
from dflop_jax.cluster.handshake import Refused, introduce
from dflop_jax.cluster.links import send_at_once
from dflop_jax.cluster.rendezvous import ANSWER_S, RETRY_S, has_ended

KNOCK_S = 1.0  # longest wait for a connection to another host


@dataclass(frozen=True)
class Assembly:
    """Who takes part, by number; open links by place in `hosts`: to every other on the first of
    them, to the first (place 0) elsewhere."""

    hosts: tuple[int, ...]
    links: Mapping[int, socket.socket]


def assemble(
    card: Card,
    addresses: Sequence[Address],
    secret: bytes,
    *,
    least: int,
    patience_s: float,
    timeout_s: float,
    waiting: Callable[[str], None] = lambda why: None,
) -> Assembly:
    """Come together with the agents of the other hosts.

    Args:
      addresses: of hosts 0, 1, ...: those that may be first.
      patience_s: after which a host that has not come is gone.
      timeout_s: longest wait; where a run that goes on takes this host in, it is that one's.
      waiting: told when a run goes on that is to take this host in.

    Raises:
      TryAgain: too few came in time, or this host's port is in use.
      ValueError: this host cannot listen, two have one number, or they disagree about the number of
        hosts, versions or the secret.
    """
    return _Gathering(card, addresses, secret, least, patience_s, waiting).run(timeout_s)


class _Gathering:
    """One agent's part in an assembly."""

    def __init__(
        self,
        card: Card,
        addresses: Sequence[Address],
        secret: bytes,
        least: int,
        patience_s: float,
        waiting: Callable[[str], None],
    ):
        self._card, self._addresses, self._secret = card, addresses, secret
        self._least, self._patience_s, self._waiting = least, patience_s, waiting
        self._came: dict[int, tuple[Card, socket.socket]] = {}
        self._others = [a for h, a in enumerate(addresses) if h != card.host]
        self._promise, self._met, self._turned_away = "", "", ""

    def run(self, timeout_s: float) -> Assembly:
        """See `assemble`."""
        deadline = time.monotonic() + timeout_s
        while (came := self._gather_or_knock(deadline)) is not None:
            if isinstance(came, Assembly):
                return came
            if assembly := self._wait(came):
                return assembly
            if self._promise:  # a place in a run, which now meets anew
                deadline = max(deadline, time.monotonic() + timeout_s)
        me, at = self._card, ", ".join(map(str, self._addresses))
        why = f"host {me.host} met no others of the {me.hosts} hosts at {at}"
        if self._met:
            why = f"host {me.host} met only {self._met} of the {me.hosts} hosts"
        why += f" within {timeout_s:g} s; see their logs"
        raise TryAgain(f"{why}; {self._turned_away}" if self._turned_away else why)

    def _gather_or_knock(self, deadline: float) -> Assembly | socket.socket | None:
        """Those that have come here; or a connection to a host that gathers, if one opens first.
        None: neither in time."""
        me, door = self._card, None
        if me.host < len(self._addresses):
            door = Door(listen(self._addresses[me.host]), self._secret)
        knocker = _Knocker(self._knock_at_next)
        begun_s = signed_s = time.monotonic()
        try:
            while (now_s := time.monotonic()) < deadline:
                if door:
                    self._let_in(door)
                    cards = [me, *(card for card, _ in self._came.values())]
                    if is_enough(cards, self._least, now_s - begun_s > self._patience_s):
                        return self._send_on()
                else:
                    time.sleep(LOOK_S)
                if now_s - signed_s > SIGN_S:
                    signed_s = now_s
                    for _, sock in self._came.values():
                        say(sock, WAIT)
                if link := knocker.found():
                    return link
        finally:
            knocker.close()
            self._met = ", ".join(map(str, sorted(self._came)))
            for _, sock in self._came.values():  # they find the way by themselves
                say(sock, AGAIN)
                sock.close()
            self._came.clear()
            if door:
                self._turned_away = door.turned_away()
                door.close()
        return None

    # ---- gathering ----

    def _let_in(self, door: Door) -> None:
        door.accept(LOOK_S)
        for host in [h for h, (_, s) in self._came.items() if has_ended(s)]:
            self._came.pop(host)[1].close()
        for guest in door.guests():
            self._welcome(guest)

    def _welcome(self, guest: Guest) -> None:
        card = msgspec.json.decode(guest.hello, type=Card)
        if why := disagreement(self._card, card):
            say(guest.sock, NO, why)
        elif card.host in self._came:
            say(guest.sock, NO, two_of(card.host))
        elif card.host < self._card.host:
            say(guest.sock, AGAIN)
        else:
            say(guest.sock, WAIT)
            self._came[card.host] = card, guest.sock
            return
        guest.sock.close()

    def _send_on(self) -> Assembly:
        hosts = (self._card.host, *sorted(self._came))
        links = {}
        for place, host in enumerate(hosts[1:], 1):
            sock = self._came[host][1]
            send_at_once(sock)
            sock.setblocking(True)
            say(sock, GO, msgspec.json.encode((place, hosts)).decode())
            links[place] = sock
        self._came.clear()
        return Assembly(hosts, links)

    # ---- coming to others ----

    def _knock_at_next(self) -> socket.socket | None:
        """A connection to a host that has us wait for a start; None: the next one has not.

        Raises:
          ValueError: it refuses us.
        """
        if not self._others:
            return None
        self._others.append(self._others.pop(0))
        address, link = self._others[-1], None
        try:
            link = socket.create_connection((address.host, address.port), timeout=KNOCK_S)
            # Without a listener, a connection to a port of one's own host may reach itself.
            if link.getsockname() == link.getpeername():
                raise ConnectionRefusedError
            deadline = time.monotonic() + ANSWER_S
            introduce(link, self._secret, msgspec.json.encode(self._card), deadline)
            word, why = hear(link, deadline)
            if word == NO:
                raise ValueError(why)
            if word == WAIT:
                self._promise = why
                waits, link = link, None
                return waits
        except Refused as e:
            if str(e) != "no host":  # as the trainers of a run, or another program
                raise ValueError(
                    f"{address} has another secret than this host; give all hosts the same"
                ) from None
        except OSError:
            pass
        finally:
            if link:
                link.close()
        return None

    def _wait(self, link: socket.socket) -> Assembly | None:
        """Wait until who gathers goes on; None: with others, or it is gone."""
        begun_s = heard_s = time.monotonic()
        promise = self._promise
        try:
            while True:
                if promise and heard_s - begun_s > SIGN_S:  # not of a run that is about to end
                    self._waiting(promise)
                    promise = ""
                word, text = hear(link, heard_s + SILENT_S)
                heard_s = time.monotonic()
                if word == GO:
                    send_at_once(link)
                    link.settimeout(None)
                    place, hosts = msgspec.json.decode(text, type=tuple[int, tuple[int, ...]])
                    assert hosts[place] == self._card.host
                    return Assembly(hosts, {0: link})
                if word != WAIT:
                    break
        except OSError:
            pass
        link.close()
        return None


class _Knocker:
    """Knocks at the others' doors in a thread of its own: they may knock at ours meanwhile, and no
    two are to wait for each other."""

    def __init__(self, knock: Callable[[], socket.socket | None]):
        self._knock, self._lock, self._over = knock, threading.Lock(), threading.Event()
        self._found: socket.socket | None = None
        self._error: ValueError | None = None
        threading.Thread(target=self._run, name="knocking", daemon=True).start()

    def found(self) -> socket.socket | None:
        """A connection to a host that gathers, once; ValueError: one refuses us."""
        with self._lock:
            if self._error:
                raise self._error
            link, self._found = self._found, None
        return link

    def close(self) -> None:
        """Knock no more, and hang up where nobody has taken the connection."""
        with self._lock:
            self._over.set()
            if self._found:
                self._found.close()
            self._found = None

    def _run(self) -> None:
        while not self._over.wait(RETRY_S):
            try:
                link = self._knock()
            except ValueError as e:
                self._error = e
                return
            if link is None:
                continue
            with self._lock:
                if self._over.is_set():
                    link.close()
                else:
                    self._found = link
            return
