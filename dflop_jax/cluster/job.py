"""What an agent starts on its host, and what each of the processes is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflop_jax.cluster.addresses import LOOPBACK, Address
from dflop_jax.cluster.claims import claim
from dflop_jax.cluster.decide import Order
from dflop_jax.cluster.group import Start
from dflop_jax.cluster.restarts import Limits
from dflop_jax.cluster.variables import (
    AGENT_ENV,
    COORDINATOR_ENV,
    FEWER_ENV,
    FULL_NUMBER_ENV,
    LEAST_ENV,
    LOCAL_INDEX_ENV,
    LOCAL_NUMBER_ENV,
    NUM_PROCESSES_ENV,
    PROCESS_ID_ENV,
    RESTARTS_ENV,
    RUN_ENV,
)


@dataclass(frozen=True)
class LaunchResult:
    """How a launch ended.

    Attributes:
      exit_code: of the first process that failed, 0 when none did; 128+s when signal s killed it.
      exit_codes: of every process of this host, at their last start.
    """

    exit_code: int
    exit_codes: tuple[int, ...]


@dataclass(frozen=True)
class Job:
    """What runs on this host: a program, and the variables and cores of each of its processes."""

    program: Sequence[str]
    environments: Sequence[Mapping[str, str]]
    cores: Sequence[set[int] | None]


@dataclass(frozen=True)
class Place:
    """Where this host stands among those of the run: its number of `hosts`, and where agents
    listen: that of host 0 and of others that may be first in its place."""

    host: int = 0
    hosts: int = 1
    addresses: tuple[Address, ...] = ()


def start_of(
    job: Job,
    host: Place,
    order: Order,
    active: Sequence[int],
    place: int,
    folder: Path,
    limits: Limits,
) -> Start:
    """How the process in a place of this host is started.

    Args:
      active: places whose processes are.
      folder: where they tell how far they are.
    """
    at = order.hosts.index(host.host)
    first = host.addresses[order.hosts[0]].host if host.addresses else LOOPBACK
    said = {
        COORDINATOR_ENV: str(Address(first, order.port)),
        NUM_PROCESSES_ENV: str(sum(order.numbers)),
        PROCESS_ID_ENV: str(sum(order.numbers[:at]) + active.index(place)),
        LOCAL_NUMBER_ENV: str(len(job.cores)),
        LOCAL_INDEX_ENV: str(place),
    }
    if limits.restarts:
        restarts = str(order.start - 1)
        said |= {AGENT_ENV: str(folder), RUN_ENV: order.name, RESTARTS_ENV: restarts}
    if limits.least:
        one_less = 1 if len(order.hosts) == 1 else min(order.numbers)
        fewer = sum(order.numbers) - one_less
        said |= {
            LEAST_ENV: str(limits.least),
            FULL_NUMBER_ENV: str(order.full),
            FEWER_ENV: str(fewer if fewer >= limits.least else 0),
        }
    return Start(job.program, {**job.environments[place], **said}, job.cores[place])


def claimed(order: Order) -> int:
    """The number of a start that is this part's of the run, with which others may go on as well; 0:
    it is theirs."""
    if not order.count_file:  # the run has not begun, so that all hosts are here
        return order.start
    try:
        return claim(Path(order.count_file).parent, order.name, order.start, order.hosts)
    except OSError:
        return 0
