"""Where agents that come back wait while a run goes on: at the door of its first host."""

from __future__ import annotations

import socket
import threading
import time

import msgspec

from dflop_jax.cluster.addresses import Address
from dflop_jax.cluster.cards import AGAIN, NO, SIGN_S, WAIT, Card, disagreement, say, two_of
from dflop_jax.cluster.door import LOOK_S, Door, Guest, listen
from dflop_jax.cluster.rendezvous import has_ended


class Reception:
    """Keeps the door of this host, which is the first, open."""

    def __init__(self, card: Card, at: Address, secret: bytes):
        self._card = card
        self._waiting: dict[int, socket.socket] = {}
        self._over = threading.Event()
        self._door = Door(listen(at), secret)
        self._thread = threading.Thread(target=self._run, name="reception", daemon=True)
        self._thread.start()

    @property
    def hosts(self) -> tuple[int, ...]:
        """Those that wait."""
        return tuple(sorted(self._waiting))

    def close(self) -> None:
        """Send those who wait to the next assembly."""
        self._over.set()
        self._thread.join()
        self._door.close()
        for sock in self._waiting.values():
            say(sock, AGAIN)
            sock.close()

    def _run(self) -> None:
        signed_s = 0.0
        while not self._over.is_set():
            self._door.accept(10 * LOOK_S)
            for host in [h for h, s in self._waiting.items() if has_ended(s)]:
                self._waiting.pop(host).close()
            for guest in self._door.guests():
                self._welcome(guest)
            if time.monotonic() - signed_s > SIGN_S:
                signed_s = time.monotonic()
                for sock in self._waiting.values():
                    say(sock, WAIT)

    def _welcome(self, guest: Guest) -> None:
        card = msgspec.json.decode(guest.hello, type=Card)
        why = disagreement(self._card, card)
        if why or card.host in self._waiting or card.host == self._card.host:
            say(guest.sock, NO, why or two_of(card.host))
            guest.sock.close()
            return
        say(guest.sock, WAIT, f"the run goes on without host {card.host} and will take it in")
        self._waiting[card.host] = guest.sock
