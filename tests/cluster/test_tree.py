"""The tree in which messages of many processes go, played by threads over socket pairs."""

from __future__ import annotations

from typing import Any

import pytest

from dflop_jax.cluster.peers import Peers
from dflop_jax.cluster.tree import children_of, parent_of
from tests.cluster.conftest import SMALL_S, hang_up


@pytest.mark.parametrize("n, fan_out", [(1, 1), (2, 1), (7, 1), (7, 2), (8, 2), (13, 3), (5, 32)])
def test_each_process_has_one_parent_above_it_and_few_children(n, fan_out):
    below = {p: children_of(p, n, fan_out) for p in range(n)}
    assert sorted(q for few in below.values() for q in few) == list(range(1, n))
    assert all(len(few) <= fan_out for few in below.values())
    for p, few in below.items():
        assert all(parent_of(q, fan_out) == p < q for q in few)


@pytest.mark.parametrize("n, fan_out", [(4, 1), (7, 2), (8, 2)])
def test_a_tree_carries_what_a_star_does(job, n, fan_out):
    many = job(n, fan_out=fan_out)

    def run(p: Peers) -> list[Any]:
        said = [p.gather("key", b"%d" % p.process), p.share("up", b"x" if p.is_hub else None)]
        for i in range(3):  # one key, again and again
            said += [p.gather("again", b"%d, %d" % (p.process, i)), p.sums("sum", [p.process, i])]
        return said

    every = [b"%d" % p for p in range(n)]
    for p, got in enumerate(many.together(run)):
        assert got[:2] == [[] if p else every, b"x"]
        for i in range(3):
            assert got[2 + 2 * i] == ([] if p else [b"%d, %d" % (q, i) for q in range(n)])
            assert got[3 + 2 * i] == [n * (n - 1) / 2, n * i]
    many.together(Peers.close)
    assert not any(many.failures)


def test_a_parent_passes_on_what_it_does_not_take_itself(job):
    """As one does whose own feed has ended, or whose next run begins later."""
    hub, middle, leaf = job(3, fan_out=1).peers
    middle.abandon("feed/")
    hub.share("feed/1", b"words")
    assert leaf.share("feed/1") == b"words"
    for p in (hub, leaf):
        p.new_run()
    hub.share("key", b"of the second run")
    assert leaf.share("key") == b"of the second run"
    middle.new_run()
    assert middle.share("key") == b"of the second run"


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("gone", [0, 1, 2, 6])
def test_the_whole_tree_hears_of_a_process_that_is_gone(job, gone, hangs):
    many = job(7, timeout_s=SMALL_S, fan_out=2)
    for end in many.ends_of(gone):
        end.hung = True
    if not hangs:
        for end in many.ends_of(gone):
            end.released.set()
            hang_up(end)
    others = [p for p in range(7) if p != gone]
    many.wait_for_failures(others)
    for p in others:
        (line,) = many.failures[p]
        assert line.startswith(f"process {gone} (")


def test_a_parent_is_not_silent_while_a_child_of_its_takes_its_time(job):
    """A long message to one that reads nothing is on its way; the parent's signs are not read."""
    hub, *_ = (many := job(3, timeout_s=SMALL_S, fan_out=1)).peers
    many.ends_of(2)[0].hung = True
    hub.share("much", bytes(1 << 24))
    try:
        many.wait_for_failures([0, 1])
    finally:
        for end in many.ends_of(2):
            hang_up(end)
    for line in (many.failures[0][0], many.failures[1][0]):
        assert line.startswith("process 2 (")
        assert "process 0" not in line
