"""Faults on purpose: what of a run survives them, and is every bit as if nothing had happened?

Command:  python benchmarks/kills.py --faults 200 --mtbf 15 --json kills.json
Minutes:  a fault takes --mtbf and a restart (10 s on two free cores): 200 take about 65; --minutes
          ends it earlier, and --go-on goes on with what the file has
Expected: survived = bit_exact = faults, orphans 0, unexpected []

One run is left alone. Others of the same configuration have a fault after the other, of every kind
of `fault_kinds.KINDS`, at every moment, a tenth of them while the run recovers from the one before;
the time between two counts from the last recovery. `dflop launch --max-restarts` starts again what
ends. A fault at a start or in a recovery comes after a SIGKILL that brings that about, which counts
as well. The file is written after each fault; whatever ends this program ends its runs. Needs
Linux, and root for full disks (a tmpfs); without, that kind is left out, and said so.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fault_kinds as fk
import msgspec
from disturbed_run import LAUNCHER_KILLED, DisturbedRun, Fault
from fault_kinds import KINDS, MOMENTS, NOT_FINITE
from faulted_run import OFTEN, Command, prepare, small_disk
from json_rows import add_json, write_json
from observed_job import Job
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dflop_jax.report.run_folder import read_metrics
from dflop_jax.report.spent import TRAINING, read_spent

# Of the time-outs of a run: what was not measured of a section yet has 30 times the least, and a
# recovery follows. Nothing takes as long.
LIMIT_FACTOR = 60.0
IN_RECOVERY = 0.1  # share of the faults
# Of a run: it is four times as long as from one fault to the next, where a step takes 43 ms, so
# that its start is a small part of it; its end, where some faults are done, comes soon enough.
STEPS_A_SECOND = 100.0
LEAST_STEPS = 400
# With a fault each so many seconds, saves and evaluations come every few steps of 40 ms. Where
# faults are as many times rarer, these are as well.
OFTEN_MTBF_S = 15.0


@dataclass(frozen=True)
class Campaign:
    """What came of all faults so far.

    Attributes:
      runs: that have ended; `exact` of them have the losses of the undisturbed one, and had
        `exact_faults` faults; `skips` had the step that is not finite, as that one.
      orphans: processes that a launcher left behind.
      trained_s, wall_s: of the runs.
    """

    faults: Sequence[Fault] = ()
    runs: int = 0
    exact: int = 0
    exact_faults: int = 0
    orphans: int = 0
    skips: int = 0
    trained_s: float = 0.0
    wall_s: float = 0.0

    @property
    def goodput(self) -> float:
        return self.trained_s / self.wall_s if self.wall_s else 0.0


def losses(run_dir: Path) -> list[float]:
    """Of every step, each of which has exactly one row."""
    rows = read_metrics(run_dir)
    assert [r["step"] for r in rows] == list(range(len(rows))), f"{run_dir}: steps lost or doubled"
    return [r["loss"] for r in rows]


def whole_run(command: Command, run_dir: Path, limit_s: float) -> list[float]:
    """The losses of a run that nobody disturbs."""
    job = Job(command(run_dir), run_dir, run_dir.with_suffix(".log"))
    try:
        code = job.launcher.wait(2 * limit_s)
        assert code == 0, f"exit code {code}: {job.said()[-2000:]}"
    finally:
        job.end()
    return losses(run_dir)


def draws(kinds: Sequence[str], n: int, rng: random.Random) -> Iterator[tuple[str, str]]:
    """(kind, moment) of `n` faults: of each kind as many, at the moments that it is done at least
    often so far."""
    seen: Counter[str] = Counter()
    for i in range(n):
        if i % len(kinds) == 0:
            order = rng.sample(list(kinds), len(kinds))
        kind = order[i % len(kinds)]
        allowed = KINDS[kind].moments if kind in KINDS else MOMENTS
        if rng.random() < IN_RECOVERY and fk.RECOVERY in allowed:
            allowed = (fk.RECOVERY,)
        fewest = min(seen[m] for m in allowed)
        moment = rng.choice([m for m in allowed if seen[m] == fewest])
        seen[moment] += 1
        yield kind, moment


def campaign(
    command: Command,
    folder: Path,
    wanted: Sequence[tuple[str, str]],
    run_of: Callable[[Path], DisturbedRun],
    *,
    mtbf_s: float,
    limit_s: float,
    rng: random.Random,
    before: Campaign = Campaign(),
    until_s: float = float("inf"),
    tell: Callable[[Campaign], None] = lambda _: None,
) -> Campaign:
    """Do faults, (kind, moment) each, to one run after the other, until there are as many as are
    wanted, and compare each run with one that nobody disturbs.

    Args:
      run_of: starts a run in a folder.
      before: what was done by an earlier call for the same faults, to go on with.
      until_s: when no further fault is done, by `time.monotonic`.
      tell: gets what came of them after every fault.
    """
    expected = whole_run(command, folder / "undisturbed", limit_s)
    skipped = [r["step"] for r in read_metrics(folder / "undisturbed") if r["skipped"]]
    done, begun_s = before, time.monotonic()
    left = list(wanted[sum(not f.brings for f in before.faults) :])

    def is_over() -> bool:
        return len(done.faults) >= len(wanted) or time.monotonic() > until_s

    while left and not is_over():
        run_dir = folder / f"disturbed{done.runs}"
        run, here = run_of(run_dir), 0
        try:
            while left and not is_over():
                run.wait(rng.expovariate(1.0 / mtbf_s) if mtbf_s else 0.0)
                faults = run.strike(*left[0])
                if not faults:
                    break
                left.pop(0)
                here += len(faults)
                done = replace(done, faults=(*done.faults, *faults))
                minutes = (time.monotonic() - begun_s) / 60
                of = f"{len(done.faults)} of {len(wanted)} after {minutes:.1f} minutes"
                print(f"{of}: {faults[-1]}", flush=True)
                tell(done)
                if not faults[-1].survived:
                    break
            code = run.finish()
        finally:
            run.end()
        same = False
        with suppress(AssertionError, OSError):
            same = code == 0 and losses(run_dir) == expected
        done = with_run(done, run_dir, same=same, faults=here, orphans=run.orphans, skipped=skipped)
        tell(done)
        print(
            f"run {done.runs}: exit code {code}, losses {'equal' if same else 'DIFFER'}, "
            f"goodput {done.goodput:.2f} so far",
            flush=True,
        )
    return done


def with_run(
    done: Campaign, run_dir: Path, *, same: bool, faults: int, orphans: int, skipped: list[int]
) -> Campaign:
    """The campaign with a run that is over: whether its losses are the `same`, its faults, and
    whether it skipped the steps that the undisturbed one did."""
    skips = 0
    with suppress(OSError):
        skips += [r["step"] for r in read_metrics(run_dir) if r["skipped"]] == skipped
    spent = read_spent(run_dir)
    return replace(
        done,
        runs=done.runs + 1,
        exact=done.exact + same,
        exact_faults=done.exact_faults + same * faults,
        orphans=done.orphans + orphans,
        skips=done.skips + skips,
        trained_s=done.trained_s + (spent.seconds.get(TRAINING, 0.0) if spent else 0.0),
        wall_s=done.wall_s + (spent.wall_s if spent else 0.0),
    )


def summary(done: Campaign) -> dict[str, Any]:
    """What is written; a step that is not finite counts as a fault of every run. Of a launcher that
    was killed the time to a step is that of a new launch, and not among the others."""
    to_step = {
        name: {"median": statistics.median(some), "worst": max(some), "n": len(some)}
        for name, some in (
            ("kill_to_step_s", _to_step_s(done, lambda kind: kind != LAUNCHER_KILLED)),
            ("launch_to_step_s", _to_step_s(done, lambda kind: kind == LAUNCHER_KILLED)),
        )
        if some
    }
    return {
        "faults": len(done.faults) + done.runs,
        "by_kind": dict(Counter(f.kind for f in done.faults)) | {NOT_FINITE: done.runs},
        "by_moment": dict(Counter(f.moment for f in done.faults)) | {NOT_FINITE: done.runs},
        "survived": sum(f.survived for f in done.faults) + done.skips,
        "bit_exact": done.exact_faults + done.exact,
        "orphans": done.orphans,
        "goodput": done.goodput,
        "kill_to_step_s": {},
        **to_step,
        "runs": done.runs,
        "unexpected": [f for f in done.faults if f.unexpected],
        "campaign": done,
    }


def _to_step_s(done: Campaign, counts: Callable[[str], bool]) -> list[float]:
    return [f.to_step_s for f in done.faults if f.to_step_s is not None and counts(f.kind)]


def done_before(file: Path | None) -> Campaign:
    """What an earlier call has written; ValueError if nothing is there."""
    try:
        value = msgspec.json.decode(file.read_bytes() if file else b"")
        return msgspec.convert(value["campaign"], Campaign)
    except (OSError, KeyError, msgspec.DecodeError) as e:
        raise ValueError(f"--go-on: {file} has no campaign to go on with ({e})") from None


def table(done: Campaign) -> Table:
    out = Table("kind", "expected", "faults", "survived", "started again", "unexpected",
                title=f"{done.exact} of {done.runs} runs have every bit of the undisturbed one; "
                f"{done.orphans} orphans; goodput {done.goodput:.2f}")  # fmt: skip
    for name in dict.fromkeys(f.kind for f in done.faults):
        some = [f for f in done.faults if f.kind == name]
        expected = KINDS[name].expected if name in KINDS else "a new launch resumes; no orphans"
        out.add_row(
            name, expected, str(len(some)), str(sum(f.survived for f in some)),
            str(sum(f.restarted for f in some)),
            "; ".join(f"{f.moment}: {f.unexpected}" for f in some if f.unexpected),
        )  # fmt: skip
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--faults", type=int, default=30, help="how many (default: 30)")
    mean = "mean seconds from a recovery to the next fault (default: 15)"
    parser.add_argument("--mtbf", type=float, default=15.0, help=mean)
    parser.add_argument("--processes", type=int, default=2, help="of each job (default: 2)")
    long = f"{STEPS_A_SECOND:.0f} a second of --mtbf, at least {LEAST_STEPS}"
    parser.add_argument("--steps", type=int, help=f"of each run (default: {long})")
    parser.add_argument("--seed", type=int, default=0, help="of victims and moments (default: 0)")
    kinds = [*KINDS, LAUNCHER_KILLED]
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds, help="only these")
    silent = "seconds of silence, or of a hang, that a run takes for a fault (default: 5)"
    parser.add_argument("--silent", type=float, default=5.0, help=f"{silent}; more under load")
    parser.add_argument("--minutes", type=float, help="do no further fault after so many")
    again = "go on with the campaign that --json FILE has, with the same other flags"
    parser.add_argument("--go-on", action="store_true", help=again)
    parser.add_argument("--folder", type=Path, help="keep runs and logs here (a new folder)")
    add_json(parser)
    args = parser.parse_args()
    if args.steps is None:
        args.steps = max(LEAST_STEPS, round(STEPS_A_SECOND * args.mtbf))
    for name in ("faults", "processes", "steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)} must be at least 1")
    if args.mtbf < 0 or args.silent <= 0:
        parser.error("--mtbf must be at least 0, and --silent above 0")
    if not Path("/proc/self/environ").exists():
        parser.error("this platform shows no processes in /proc; run it on Linux")
    before = Campaign()
    try:
        if args.go_on:
            before = done_before(args.json)
        if args.folder:
            args.folder.mkdir(parents=True)
    except ValueError as e:
        parser.error(str(e))
    except OSError as e:
        parser.error(f"--folder {args.folder}: {e.strerror}; name a new one")
    folder = (args.folder or Path(tempfile.mkdtemp(prefix="kills-"))).resolve()
    until_s = time.monotonic() + 60 * args.minutes if args.minutes else float("inf")
    every = OFTEN.times(max(1, round(args.mtbf / OFTEN_MTBF_S)))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that all is ended
    limit_s = LIMIT_FACTOR * args.silent
    with small_disk(folder / "runs") as can_fill:
        kinds = [k for k in args.kinds if can_fill or k != "full disk"]
        if len(kinds) < len(args.kinds):
            print("no full disk: a tmpfs can be mounted by root only", flush=True)
        print(f"runs and logs: {folder}", flush=True)
        command, cache = prepare(
            folder,
            folder / "runs",
            args.processes,
            args.steps,
            silent_s=args.silent,
            every=every,
        )
        rng = random.Random(f"{args.seed} {len(before.faults)}")
        n, steps = args.processes, args.steps
        done = campaign(
            command,
            folder / "runs",
            list(draws(kinds, args.faults, random.Random(args.seed))),
            lambda run_dir: DisturbedRun(
                command,
                run_dir,
                n=n,
                steps=steps,
                cache=cache,
                rng=rng,
                limit_s=limit_s,
                every=every,
            ),
            mtbf_s=args.mtbf,
            limit_s=limit_s,
            rng=rng,
            before=before,
            until_s=until_s,
            tell=lambda done: write_json(args.json, summary(done)),
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table(done))


if __name__ == "__main__":
    main()
