"""An agent's part in the copies of its run: which it keeps, and where the processes find them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dflop_jax.cluster.addresses import LOOPBACK, Address, host_of, reached_at
from dflop_jax.cluster.assembly import Assembly
from dflop_jax.cluster.copy_server import CopyServer
from dflop_jax.cluster.decide import Order, Report
from dflop_jax.cluster.job import Place
from dflop_jax.cluster.shelf import Shelf


class CopyKeeper:
    """Keeps copies as long as the agent of this host lives.

    Args:
      on: whether the run is started again; without, nothing is kept.
    """

    def __init__(self, secret: bytes, *, on: bool):
        self._secret, self._on = secret, on
        self._shelf = Shelf()
        self._server: CopyServer | None = None
        self._own_host, self._met = LOOPBACK, Assembly((0,), {})

    def meet(self, place: Place, met: Assembly) -> None:
        """Those who take part have met; from the first time on this host lets in who copies.

        Raises:
          TryAgain: no port is free.
        """
        self._met = met
        if met.hosts[0] != place.host:
            self._own_host = host_of(met.links[0].getsockname())
        elif place.addresses:
            self._own_host = place.addresses[place.host].host
        if self._server is None and self._on:
            self._server = CopyServer(self._shelf, self._own_host, self._secret)

    def told_in(self, report: Report) -> Report:
        """An agent's report, with where it keeps copies."""
        port = self._server.address.port if self._server else 0
        return msgspec.structs.replace(report, copies=port)

    def told_of(self, order: Order, reports: Sequence[Report]) -> Order:
        """On the first host: an order, with where all agents keep copies, by their reports."""
        if not self._on:
            return order
        hosts = [self._own_host]
        hosts += [reached_at(self._met.links[i], self._own_host) for i in range(1, len(reports))]
        both = zip(hosts, reports, strict=True)
        at = tuple(str(Address(h, r.copies)) if r.copies else "" for h, r in both)
        return msgspec.structs.replace(order, copies=at)

    def follow(self, order: Order, last: int) -> None:
        """Before a start: where this agent's `last` one was not the one before, what it keeps is of
        steps that others have done anew."""
        if order.after != last:
            self._shelf.clear()

    def close(self) -> None:
        """Let nobody in any more."""
        if self._server:
            self._server.close()
