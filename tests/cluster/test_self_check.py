"""A host that is not fit says so in one line, and soon."""

from __future__ import annotations

import calendar
import errno
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from dflop_jax.cluster import self_check
from dflop_jax.cluster.addresses import LOOPBACK, Address
from dflop_jax.cluster.ending import TryAgain
from dflop_jax.cluster.self_check import (
    check_clock,
    check_disk,
    check_host,
    check_link,
    check_product,
    own_address,
    run_checks,
)


def test_a_host_that_is_fit_says_nothing(tmp_path):
    check_host(Address(LOOPBACK, 1), tmp_path / "run" / "not there yet")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["product", "link", "disk", "clock"])
def test_each_of_four_is_looked_at(monkeypatch, tmp_path, name):
    for each in ("product", "link", "disk", "clock"):
        said = "is ill" if each == name else ""
        monkeypatch.setattr(self_check, f"check_{each}", lambda *_, said=said: said)
    with pytest.raises(TryAgain, match=f"its {name} is ill"):
        check_host(Address(LOOPBACK, 1), tmp_path)


def test_what_fails_or_hangs_is_one_line_in_time():
    started = time.monotonic()
    with pytest.raises(TryAgain, match="is not fit for a run: its disk is broken") as failed:
        run_checks({"clock": str, "disk": lambda: "is broken"})
    assert "\n" not in str(failed.value)
    released = threading.Event()
    with pytest.raises(TryAgain, match=r"its link does not end within 0\.2 s"):
        run_checks({"clock": str, "link": lambda: str(released.wait())}, 0.2)
    released.set()
    with pytest.raises(TryAgain, match="its link OSError: no such interface"):
        run_checks({"link": lambda: (_ for _ in ()).throw(OSError("no such interface"))})
    assert time.monotonic() - started < self_check.LIMIT_S
    run_checks({})


def test_a_wrong_product_is_noticed():
    def flips(a, b):
        c = np.matmul(a, b)
        c.view(np.int32)[3, 5] ^= 1 << 12  # a bit of the fraction
        return c

    assert check_product() == ""
    assert "is wrong" in check_product(flips)


def test_a_disk_that_is_broken_is_told_from_one_that_others_complain_of(tmp_path, monkeypatch):
    assert check_disk(tmp_path / "a" / "b") == ""
    for code, said in ((errno.EIO, "fails"), (errno.ENOSPC, ""), (errno.EROFS, "")):

        def fails(*_, code=code):
            raise OSError(code, "no")

        monkeypatch.setattr(self_check.os, "fsync", fails)
        assert said in check_disk(tmp_path)
        assert bool(said) == bool(check_disk(tmp_path))
    monkeypatch.undo()
    monkeypatch.setattr(self_check.os, "fsync", lambda fd: self_check.os.ftruncate(fd, 7))
    assert "gives back other bytes" in check_disk(tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_address_of_another_host_is_no_link():
    assert check_link(LOOPBACK) == ""
    with pytest.raises(OSError, match=r"address"):
        check_link("192.0.2.1")
    assert own_address(Address(LOOPBACK, 9)) == LOOPBACK
    assert own_address(Address("no-such-host.invalid", 9)) == LOOPBACK


@pytest.mark.parametrize("rate, ok", [(1.0, True), (1.1, True), (0.0, False), (2.0, False)])
def test_a_clock_goes_as_fast_as_the_other(rate, ok):
    steady = [0.0]

    def pause(s):
        steady[0] += s

    said = check_clock(lambda: 1.8e9 + rate * steady[0], lambda: steady[0], pause)
    assert (said == "") == ok
    assert "long past" in check_clock(lambda: steady[0], lambda: steady[0], pause)
    new_year = calendar.timegm((2025, 1, 1, 0, 0, 0))
    for begin, is_past in ((new_year - 60, True), (new_year, False)):
        said = check_clock(lambda begin=begin: begin + steady[0], lambda: steady[0], pause)
        assert ("long past" in said) == is_past
    assert Path("/proc").exists() is False or check_clock() == ""
