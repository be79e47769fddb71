"""When a failed run is started again, and when that is enough: plain functions."""

from __future__ import annotations

import signal

import msgspec
import pytest

from dflop_jax.cluster.decide import Report, decide
from dflop_jax.cluster.restarts import (
    LONGEST_WAIT_S,
    Count,
    End,
    Limits,
    Setback,
    cause,
    enough,
    failed_twice,
    setback,
    wait_s,
)
from dflop_jax.cluster.told import Failure

NOW_S = 1e9
OFTEN = Limits(restarts=100, an_hour=100)


def error(step: int | None = 7, time_s: float = NOW_S, **more) -> Setback:
    samples = tuple(f"row {i}" for i in range(12)) if step is not None else ()
    return Setback(time_s, "process 1 ended with exit code 1 (no)", 1, True, step, samples, **more)


def kill(time_s: float = NOW_S, **more) -> Setback:
    return Setback(time_s, "process 1 was killed by SIGKILL", 137, **more)


# ---- what brought the others about ----


@pytest.mark.parametrize(
    "ends, first",
    [
        # Killed: the others see it gone, or jax fails or aborts on them, before or after.
        ([End(0, 4), End(1, -9)], 1),
        ([End(0, -signal.SIGABRT), End(1, -signal.SIGSEGV)], 1),
        ([End(0, 1, failure=Failure(1, "gloo: connection closed")), End(1, -9)], 1),
        # An error: the others are told its exit code, and one that jax aborts is not to blame.
        ([End(0, 1), End(1, 1, failure=Failure(1, "no"))], 1),
        ([End(0, -signal.SIGABRT), End(1, 1)], 1),
        ([End(0, -signal.SIGABRT, failure=Failure(1, "no")), End(1, 4)], 0),
        # Bad input goes before all else.
        ([End(0, -9), End(1, 2)], 1),
        ([End(0, 1, failure=Failure(2, "a script's own")), End(1, 4)], 0),
        # What was stopped is no cause.
        ([End(0, -15, by_itself=False), End(1, 4)], 1),
        ([End(0, 4), End(1, 4)], 0),
    ],
)
def test_the_cause_of_several_ends(ends, first):
    assert cause(ends) == ends[first]


@pytest.mark.parametrize("codes", [[0, 0], [3, 3], [3, 0], []])
def test_a_good_end_has_no_cause(codes):
    assert cause(End(i, code) for i, code in enumerate(codes)) is None


@pytest.mark.parametrize(
    "end, exit_code, is_error, says",
    [
        (End(1, -9), 137, False, "process 1 was killed by SIGKILL"),
        (End(1, 4), 4, False, "process 1 ended with exit code 4"),
        (End(1, 2), 2, False, "process 1 ended with exit code 2"),
        (End(0, 7), 7, True, "process 0 ended with exit code 7"),
        (End(0, 1, failure=Failure(4, "x")), 4, False, "process 0 ended with exit code 1 (x)"),
        (End(0, 1, failure=Failure(1, "no", 3)), 1, True, "process 0 ended with exit code 1 (no)"),
    ],
)  # fmt: skip
def test_which_failures_are_the_runs_own(end, exit_code, is_error, says):
    kept = setback(end, NOW_S, True)
    assert (kept.exit_code, kept.error, kept.why) == (exit_code, is_error, says)


# ---- limits ----


def test_without_restarts_nothing_is_said():
    assert enough([], kill(), Limits()) == " "


def test_bad_input_is_never_tried_again():
    assert enough([], Setback(NOW_S, "", 2), OFTEN) == " "


def test_three_errors_at_one_step_stop_a_run():
    others = [error(6), kill(), error(8), error(None)]
    assert enough([*others, error()], error(), OFTEN) == ""
    said = enough([*others, error(), kill(), error()], error(), OFTEN)
    assert "3 errors of its own at step 7" in said
    assert "(no)" in said
    assert "row 0, row 1, row 2, row 3, row 4, row 5, row 6, row 7, ..." in said
    assert "before the first step" in enough([error(None)] * 2, error(None), OFTEN)
    assert enough([kill()] * 50, kill(), OFTEN) == ""


def test_the_limits():
    assert enough([kill()] * 4, kill(), Limits(5, 100)) == ""
    assert "--max-restarts 5" in enough([kill()] * 5, kill(), Limits(5, 100))
    old, new = [kill(NOW_S - 3601.0)] * 3, [kill(NOW_S - 3599.0)] * 2
    assert enough([*old, *new], kill(), Limits(100, 3)) == ""
    assert "--restarts-an-hour 3" in enough([*old, *new, kill()], kill(), Limits(100, 3))
    with pytest.raises(ValueError, match="--max-restarts -1 must be at least 0"):
        Limits(-1)
    with pytest.raises(ValueError, match="--restarts-an-hour 0 must be at least 1"):
        Limits(1, 0)


def test_the_wait_grows_with_failures_in_vain():
    waits, before = [], list[Setback]()
    for last in (kill(gained=True), *[kill()] * 9, kill(gained=True), kill()):
        waits.append(wait_s(before, last))
        before.append(last)
    assert waits == [0.0, 0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, LONGEST_WAIT_S, 60.0, 0.0, 0.0]


# ---- counted in the run's folder ----


def test_counts_survive_a_requeue_but_no_end(tmp_path):
    file = tmp_path / "restarts.jsonl"
    first = Count()
    first.add(error(None))  # before the folder is known
    first.keep_in(file)
    first.add(kill())
    requeued = Count()
    requeued.add(error())
    requeued.keep_in(file)
    assert requeued.setbacks == [error(None), kill(), error()]
    with file.open("ab") as rows:
        rows.write(b'{"time_s": 12')  # cut short by a kill
    again = Count()
    again.keep_in(file)
    assert len(again.setbacks) == 3
    again.add(kill(is_last=True))
    later = Count()
    later.keep_in(file)
    assert later.setbacks == []
    later.add(Setback(NOW_S, "done", 0, is_last=True))
    assert file.read_bytes().count(b"\n") == 5  # a run without a setback adds none


# ---- hosts that agree ----


def report(start: int, **more) -> Report:
    return Report(number=2, name="a", start=start, **more)


def test_hosts_start_together():
    order = decide([report(0), Report(number=3, name="b")], Count(), Limits(), NOW_S)
    assert (order.exit_code, order.start, order.numbers, order.name) == (None, 1, (2, 3), "a")


def test_hosts_start_again_after_a_failure_on_one():
    failed = report(1, ends=(End(2, -9),), exit_code=137)
    stopped = report(1, ends=(End(0, -15, by_itself=False),), exit_code=143, lost="one failed")
    count = Count()
    order = decide([stopped, failed], count, OFTEN, NOW_S)
    assert (order.exit_code, order.start) == (None, 2)
    assert order.says == "process 2 was killed by SIGKILL; restart 1 of 100"
    assert [s.exit_code for s in count.setbacks] == [137]
    over = decide([stopped, failed], count, Limits(1), NOW_S)
    assert (over.exit_code, over.says) == (137, "no restart is left of --max-restarts 1")


def test_a_host_that_was_lost_is_told_the_rest():
    stays = Report(number=2, name="b", start=4, lost="host 0 died")
    order = decide([report(0), stays], Count(), OFTEN, NOW_S)
    assert (order.start, order.name) == (5, "b")
    assert "the launcher of host 0 was lost" in order.says
    assert decide([report(0), stays], Count(), Limits(), NOW_S).exit_code == 4


@pytest.mark.parametrize(
    "codes, signalled, ends_by",
    [((0, 0), False, 0), ((0, 3), False, 3), ((0, 137), True, 137), ((0, 0), True, 0)],
)
def test_the_end_of_a_run(codes, signalled, ends_by):
    reports = [report(2, exit_code=c, signalled=signalled) for c in codes]
    assert decide(reports, Count(), OFTEN, NOW_S).exit_code == ends_by


def test_the_host_that_is_to_blame_is_kept_where_it_is_known():
    killed = setback(End(1, -9, host="b"), NOW_S, True)
    hung = setback(
        End(0, 4, failure=Failure(4, "process 1 hangs", 3, host="b"), host="a"), NOW_S, True
    )
    lost = setback(End(0, 4, host="a"), NOW_S, True)  # process 1 died, it says
    own = setback(End(0, 1, failure=Failure(1, "no", 3), host="a"), NOW_S, True)
    assert [s.host for s in (killed, hung, lost, own)] == ["b", "b", "", "a"]
    assert hung.why == "process 0 ended with exit code 4 (process 1 hangs)"
    assert failed_twice([]) == failed_twice([killed, lost, own, own]) == ()
    assert failed_twice([own, killed, own, hung]) == ("b",)


def test_who_hung_is_the_cause_even_where_others_then_fail():
    hung = End(1, 4, failure=Failure(4, "process 0 hangs", 3, host="b"))
    assert cause([End(0, 1, failure=Failure(1, "gloo: connection closed")), hung]) == hung


def test_a_host_that_fails_twice_is_named_where_there_are_others():
    for n, named in ((1, False), (2, True)):
        reports = [Report(number=1, name="a") for _ in range(n)]
        count = Count()
        for start in (1, 2):
            ends = (End(0, -9, host="b"),)
            first = Report(number=1, name="a", start=start, ends=ends, exit_code=137, gained=True)
            order = decide([first, *reports[1:]], count, OFTEN, NOW_S)
            assert ("failed twice or more: host b" in order.says) == (named and start == 2)


# ---- fewer processes, and more again ----

FEWER = Limits(restarts=100, an_hour=100, least=2)


def failing(place: int, *, gained: bool = False, active=(0, 1, 2)) -> Report:
    """Of a host on which the process in a place was killed."""
    ends = [End(active.index(place), -9)]
    ends += [End(i, -15, by_itself=False) for i, p in enumerate(active) if p != place]
    facts = {"ends": tuple(ends), "exit_code": 137, "gained": gained, "full": 3}
    return Report(number=len(active), places=active, name="a", start=2, **facts)


@pytest.mark.parametrize(
    "first, second, limits, left_out",
    [
        (failing(1, gained=True), failing(1), FEWER, (0, 1)),
        (failing(0), failing(0), FEWER, (0, 0)),  # process 0 as well
        (failing(1), failing(1, gained=True), FEWER, None),  # it did a step in between
        (failing(1), failing(2), FEWER, None),  # another one
        (failing(1), failing(1), OFTEN, None),  # nobody allows for fewer
        (failing(1), failing(1), Limits(100, 100, least=3), None),
    ],
)
def test_a_process_that_fails_twice_before_a_step_is_left_out(first, second, limits, left_out):
    count = Count()
    assert decide([first], count, limits, NOW_S).leaves_out is None
    order = decide([second], count, limits, NOW_S)
    assert order.leaves_out == left_out
    assert order.numbers == ((2,) if left_out else (3,))
    assert ("failed twice before a step: 2 are left" in order.says) == bool(left_out)


def broken(process: int | None, hosts: int = 1) -> list[Report]:
    """Three processes that all say that a device of one of them computes wrong."""
    end = Failure(4, "device 1 gave other bits (persistent)", 5, broken=True, process=process)
    ends = [End(i, 4, failure=end) for i in range(3)]
    if hosts == 1:
        return [
            Report(number=3, name="a", start=2, full=3, exit_code=4, gained=True, ends=(*ends,))
        ]
    return [
        Report(number=1, host=h, name="a", start=2, full=3, exit_code=4, gained=True, ends=(e,))
        for h, e in enumerate(ends)
    ]


@pytest.mark.parametrize("hosts, place", [(1, (0, 2)), (3, (2, 0))])
def test_a_device_that_computes_wrong_is_left_out_at_once(hosts, place):
    count = Count()
    order = decide(broken(2, hosts), count, FEWER, NOW_S)
    assert (order.exit_code, order.leaves_out) == (None, place)
    assert ", without the process whose device computes wrong: 2 are left" in order.says
    assert order.numbers == ((2,) if hosts == 1 else (1, 1, 0))
    assert order.meets == (() if hosts == 1 else (0, 1))
    assert [s.broken for s in count.setbacks] == [True]


@pytest.mark.parametrize(
    "process, limits, says",
    [
        (2, OFTEN, "--min-processes does not allow for 2 processes; process 0 ended with"),
        (2, Limits(100, 100, least=3), "does not allow for 2 processes"),
        (None, FEWER, "nobody knows whose device it is; process 0 ended with exit code 4 (device"),
    ],
)
def test_nothing_is_started_again_on_a_device_that_computes_wrong(process, limits, says):
    count = Count()
    order = decide(broken(process), count, limits, NOW_S)
    assert order.exit_code == 4
    assert says in order.says
    assert [s.is_last for s in count.setbacks] == [True]


def test_a_place_keeps_its_number_when_another_is_gone():
    """After place 0 was left out, process 1 of the run is in place 2."""
    count = Count()
    for _ in range(2):
        order = decide([failing(2, active=(1, 2, 3))], count, FEWER, NOW_S)
    assert order.leaves_out == (0, 2)


def test_a_host_whose_only_process_is_left_out_parts_from_the_others():
    hosts = [
        Report(number=1, host=h, places=(0,), name="a", start=2, full=3, gained=False, **more)
        for h, more in (
            (0, {"ends": (End(0, -15, by_itself=False),)}),
            (1, {"ends": (End(1, -9),)}),
            (2, {"ends": (End(2, -15, by_itself=False),)}),
        )
    ]
    count = Count()
    decide(hosts, count, FEWER, NOW_S)
    order = decide(hosts, count, FEWER, NOW_S)
    assert (order.meets, order.leaves_out) == ((0, 2), (1, 0))
    # They come to the next meeting with nothing left to be counted.
    left = [
        Report(
            number=1, host=h, places=(0,), name="a", start=2, full=3, regroups=True, exit_code=143
        )
        for h in (0, 2)
    ]
    order = decide(left, count, FEWER, NOW_S)
    assert (order.start, order.hosts, order.numbers) == (3, (0, 2), (1, 1))
    assert len(count.setbacks) == 2


def test_hosts_that_are_back_are_taken_in_without_a_setback():
    first, other = (
        Report(number=1, host=h, name="a", start=4, full=3, exit_code=3, gained=True, **more)
        for h, more in ((1, {"regroups": True, "waiting": (0,)}), (2, {}))
    )
    count = Count()
    order = decide([first, other], count, FEWER, NOW_S)
    assert (order.meets, order.exit_code) == ((0, 1, 2), None)
    back = Report(number=1, host=0, name="fresh")
    rest = [msgspec.structs.replace(r, regroups=True, waiting=()) for r in (first, other)]
    order = decide([back, *rest], count, FEWER, NOW_S)
    assert (order.start, order.hosts, order.numbers, order.full) == (5, (0, 1, 2), (1, 1, 1), 3)
    assert order.name == "a"
    assert count.setbacks == []
    # A run that was done just then is done.
    done = [msgspec.structs.replace(r, exit_code=0) for r in (first, other)]
    assert decide(done, count, FEWER, NOW_S).exit_code == 0


def test_what_is_said_of_fewer():
    stays = Report(number=3, host=0, name="a", start=2, full=4, lost="host 1 died")
    order = decide([stays], Count(), FEWER, NOW_S)
    assert order.says == "host 1 died; restart 1 of 100, with 3 of 4 processes"
    for limits in ({"least": -1}, {"gone_after_s": float("inf")}, {"gone_after_s": -1.0}):
        with pytest.raises(ValueError, match="must be numbers from 0"):
            Limits(1, **limits)
    with pytest.raises(ValueError, match="give --max-restarts too"):
        Limits(least=2)
