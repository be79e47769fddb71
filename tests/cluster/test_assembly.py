"""How agents of hosts come together where some may be gone: played by threads over real sockets."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from dflop_jax.cluster.addresses import LOOPBACK, Address, free_port
from dflop_jax.cluster.assembly import Assembly, assemble
from dflop_jax.cluster.cards import Card, bits_of, is_enough
from dflop_jax.cluster.claims import claim, newest
from dflop_jax.cluster.ending import TryAgain
from dflop_jax.cluster.reception import Reception

LONG_S = 60.0
SECRET = b"the secret of these tests"


def card(host: int, hosts: int = 4, start: int = 3, last=(0, 1, 2, 3), **more) -> Card:
    facts = {"what": "1", "processes": 1, "begun": start > 0, "last": bits_of(last)}
    return Card(host=host, hosts=hosts, start=start, **(facts | more))


# ---- who is enough ----


@pytest.mark.parametrize(
    "came, least, waited, enough",
    [
        ((0, 1, 2, 3), 0, False, True),
        ((0, 1, 2), 0, True, False),  # nobody allows for fewer
        ((0, 1, 2), 3, False, False),  # the fourth has time to come
        ((0, 1, 2), 3, True, True),
        ((1, 2, 3), 3, True, True),  # without host 0 as well
        ((2, 3), 3, True, False),
        ((2, 3), 2, True, True),
        ((3,), 1, True, True),
    ],
)
def test_when_some_go_on(came, least, waited, enough):
    assert is_enough([card(h) for h in came], least, waited) is enough


def test_before_a_run_has_begun_all_are_needed():
    fresh = [card(h, start=0, last=()) for h in range(3)]
    assert not is_enough(fresh, 1, waited=True)
    # One that was started anew knows nothing; what the others know counts.
    assert is_enough([card(0, start=0, last=()), card(1)], 2, waited=True)


def test_nobody_waits_for_who_was_gone_already():
    some = [card(h, last=(0, 1, 2)) for h in (0, 1, 2)]
    assert is_enough(some, 2, waited=False)
    assert not is_enough(some[:2], 2, waited=False)
    # The one that was waiting to be taken in is waited for, too.
    taken_in = [card(h, last=(0, 1, 2, 3)) for h in (0, 1, 2)]
    assert not is_enough(taken_in, 2, waited=False)


# ---- coming together ----


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as threads:
        yield threads


@pytest.fixture
def come(pool):
    """Start an agent's part in a thread; its links are closed at the end."""
    addresses = [Address(LOOPBACK, free_port()) for _ in range(4)]
    parts: list[Future[Assembly]] = []

    def start(who: Card, at=None, least=2, patience_s=0.5, timeout_s=LONG_S, secret=SECRET, **more):
        limits = {"least": least, "patience_s": patience_s, "timeout_s": timeout_s}
        use = addresses if at is None else at
        parts.append(pool.submit(assemble, who, use, secret, **limits, **more))
        return parts[-1]

    start.addresses = addresses
    yield start
    for part in parts:
        if part.exception(LONG_S) is None:
            for sock in part.result().links.values():
                sock.close()


def hosts_of(parts) -> list[tuple[int, ...]]:
    return [p.result(LONG_S).hosts for p in parts]


def assert_linked(parts: list[Future[Assembly]]) -> None:
    """Every one can talk to the first."""
    first, *others = (p.result() for p in parts)
    assert sorted(first.links) == [*range(1, len(parts))]
    for place, other in enumerate(others, 1):
        other.links[0].sendall(bytes([place]))
        assert first.links[place].recv(1) == bytes([place])


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_all_come_whatever_the_order(come, order):
    parts = {}
    for host in order:
        parts[host] = come(card(host), patience_s=LONG_S)
        time.sleep(0.1)
    assert hosts_of(parts.values()) == [(0, 1, 2, 3)] * 4
    assert_linked([parts[h] for h in range(4)])


@pytest.mark.parametrize("gone", range(4))
def test_the_others_go_on_without_one_and_the_lowest_is_first(come, gone):
    left = [h for h in range(4) if h != gone]
    parts = [come(card(h)) for h in left]
    assert hosts_of(parts) == [tuple(left)] * 3
    assert_linked(parts)


def test_only_listed_hosts_can_be_first(come):
    parts = [come(card(h), at=come.addresses[:2]) for h in (1, 2, 3)]
    assert hosts_of(parts) == [(1, 2, 3)] * 3
    alone = [come(card(h), at=come.addresses[:1], timeout_s=1.0) for h in (2, 3)]
    for part in alone:
        assert isinstance(part.exception(LONG_S), TryAgain)


def test_too_few_wait_and_say_so(come):
    for timeout_s in (0.5, 2.0, 8.0, 32.0):  # a slow machine needs longer for them to meet
        parts = [come(card(h), least=3, timeout_s=timeout_s) for h in (0, 1)]
        error, _ = (part.exception(LONG_S) for part in parts)
        assert isinstance(error, TryAgain)
        if "met only 1 of the 4 hosts" in str(error):
            break
        assert "host 0 met no others of the 4 hosts" in str(error)
    else:
        pytest.fail("they never met")


@pytest.mark.slow
def test_who_comes_back_waits_until_the_run_takes_it_in(come):
    said: list[str] = []
    reception = Reception(card(1), come.addresses[1], SECRET)
    back = come(card(0, start=0, last=()), waiting=said.append)
    deadline = time.monotonic() + LONG_S
    while reception.hosts != (0,) or not said:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not back.done()
    reception.close()
    together = [back, come(card(1, last=(0, 1)), patience_s=LONG_S)]
    assert hosts_of(together) == [(0, 1)] * 2
    assert_linked(together)
    assert said == ["the run goes on without host 0 and will take it in"]


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    "other, secret, says",
    [
        (card(1, hosts=3), SECRET, "host 1 says the number of hosts is 3, host 0 says 4"),
        (card(1, what="2"), SECRET, "host 1 says it runs 2, host 0 says 1"),
        (card(1), b"another", "has another secret than this host"),
    ],
)
def test_who_disagrees_is_told(come, other, secret, says):
    come(card(0), timeout_s=3.0)
    # It does not listen, so that it is the one that knocks and is told.
    error = come(other, at=come.addresses[:1], secret=secret).exception(LONG_S)
    assert isinstance(error, ValueError)
    assert says in str(error)


def test_two_with_one_number(come):
    come(card(0), timeout_s=2.0, least=0)
    pair = [come(card(3), at=come.addresses[:1], timeout_s=3.0) for _ in range(2)]
    errors = [str(p.exception(LONG_S)) for p in pair]
    assert sum("two launchers say they are host 3" in e for e in errors) == 1


# ---- claims ----


def test_of_two_sides_one_goes_on(tmp_path):
    assert newest(tmp_path, "a") == 0
    assert claim(tmp_path, "a", 2, (0, 1, 2, 3)) == 2
    assert claim(tmp_path, "a", 3, (0, 1)) == 3
    assert claim(tmp_path, "a", 3, (2, 3)) == 0
    assert claim(tmp_path, "a", 4, (0, 1)) == 4
    assert claim(tmp_path, "a", 3, (2, 3)) == 0  # the older file has gone
    assert newest(tmp_path, "a") == 4
    assert claim(tmp_path, "another launch", 2, (2, 3)) == 2
    assert len([*(tmp_path / "claims").iterdir()]) == 2


def test_a_claim_that_one_of_us_never_began_is_passed(tmp_path):
    assert claim(tmp_path, "a", 3, (0, 1)) == 3  # and host 0 dies before it has told host 1
    assert claim(tmp_path, "a", 3, (2, 3)) == 0
    assert claim(tmp_path, "a", 3, (1, 2, 3)) == 4
    assert claim(tmp_path, "a", 3, (0,)) == 0
    assert newest(tmp_path, "a") == 4


def test_many_claim_at_once(tmp_path):
    for start in range(2, 8):
        with ThreadPoolExecutor(8) as pool:
            got = [pool.submit(claim, tmp_path, "a", start, (10 * start + h,)) for h in range(8)]
        assert sorted(g.result() for g in got) == [0] * 7 + [start]
