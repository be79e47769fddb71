"""Devices that compute otherwise than others are found and named."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import jax
import pytest

from dflop_jax.cluster.peers import Peers
from dflop_jax.config import TrainConfig
from dflop_jax.train.device_check import (
    DeviceCheck,
    check_one_kind,
    chosen,
    digest_on,
    minority,
)


def test_a_majority_names_who_differs():
    for n in range(5):
        for digests in product((b"a", b"b", b"c"), repeat=n):
            largest = max((digests.count(d) for d in digests), default=0)
            usual = [d for d in digests if 2 * digests.count(d) > n]
            named = minority(digests)
            if largest == n:
                assert named == ()
            elif usual:
                assert {digests[i] for i in named} == set(digests) - {usual[0]}
                assert len(named) == n - largest
            else:
                assert named == tuple(range(n))  # of two, both


@pytest.mark.parametrize("flag, value", [("check_every", 5), ("replay_skips", True)])
def test_devices_of_several_kinds_are_not_compared(flag, value):
    old, new = SimpleNamespace(device_kind="old"), SimpleNamespace(device_kind="new")
    check_one_kind([old, new], TrainConfig())
    check_one_kind([old, old], TrainConfig(**{flag: value}))
    with pytest.raises(ValueError, match=rf"train.{flag} .* \(new, old\); .* leave it out"):
        check_one_kind([old, new], TrainConfig(**{flag: value}))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_every_device_has_its_turn(n):
    turns = [chosen(n, t) for t in range(n)]
    assert {d for turn in turns for d in turn} == set(range(n))
    assert all(len(turn) == (2 if n == 1 else min(n, 3)) for turn in turns)
    assert all(len(set(turn)) == min(n, 3) for turn in turns)


def test_devices_that_are_well_agree():
    devices = jax.devices()[:4]
    check = DeviceCheck(devices, Peers())
    check.warm_up()
    assert check.look_at_all() is None
    assert len(digest_on(devices[0])) == 16


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_a_device_that_is_always_wrong_is_named(n):
    devices = jax.devices()[:n]
    wrong = devices[-1]
    calls = []

    def runs(device):
        calls.append(device)
        # Alone, it can be told only where it is not wrong in one way.
        return (str(len(calls)) if n == 1 else "wrong").encode() if device == wrong else b"right"

    check = DeviceCheck(devices, Peers(), runs)
    differing = check.look_at_all()
    assert differing is not None
    assert differing.kind == "persistent"
    assert differing.devices == ((0, 1) if n == 2 else (n - 1,))
    assert f"device {wrong.id} of process 0" in check.names(differing)
    assert check.process_of(differing) == 0


def test_what_does_not_happen_again_was_transient():
    devices, calls = jax.devices()[:3], []

    def runs(device):
        calls.append(device)
        return b"flip" if len(calls) == 2 else b"right"

    check = DeviceCheck(devices, Peers(), runs)
    differing = check.look()
    assert (differing.devices, differing.kind) == ((1,), "transient")
    assert check.look() is None
    assert calls[6:] == [devices[1], devices[2], devices[0]]  # the next turn
