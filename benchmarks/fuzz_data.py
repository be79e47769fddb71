"""Mutated media, records and tables through the calls of a run: what does anything but be bad?

Command:  python benchmarks/fuzz_data.py --cases 10000 --json fuzz.json
Minutes:  about 25 on two cores
Expected: no findings

Every case is a small dataset in a folder of its own with one mutated file. A child with a memory
limit opens it as a run does, indexes it and decodes its samples; it is replaced when it dies or
takes longer than the deadline. Good: samples came. Bad: a ValueError of one line. All else is a
finding: another error, a hang, a death, a connection, a file opened outside the roots.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import resource
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from json_rows import add_json, write_json

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fuzz_cases import BYTES, WAYS, Bench, record, seeds_of

SAID_EVERY = 500  # cases
DEADLINE_S = 120.0  # for one case, on a busy machine
MEMORY_BYTES = 2 << 30
SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


@dataclass(frozen=True)
class Finding:
    """A case that did something else than come or be bad; `--only` runs it again."""

    case: int
    what: str
    detail: str


def attempt(folder: Path, what: dict[str, object], rng: random.Random) -> str:
    """Do what a run does with a folder: "good" when samples came, "bad" when it was refused."""
    from dflop_jax import Config
    from dflop_jax.data import BadSample, MediaSpec, make_source
    from dflop_jax.data.decoder import decode
    from dflop_jax.records.files import load

    if "config" in what:
        load(Config, str(what["config"]))
        return "good"
    from dflop_jax.config import DataConfig

    config = DataConfig(
        path=str(what["path"]), tokenizer=str(what.get("tokenizer", "")), workers=1,
        max_tokens=100_000, max_frames=4, max_bad_fraction=1.0,
    )  # fmt: skip
    tiles = {
        "form": rng.choice(["tiles", "anyres", "dynamic"]),
        "tile_px": 32,
        "tokens_per_tile": 4,
    }
    spec = MediaSpec.of({"vision": tiles, "audio": {}}, {})

    def opened() -> object:
        return make_source(config, spec, index_dir=folder, in_processes=False)

    source = opened()
    if "mutate" in what:
        (file,) = folder.glob("index-*.npz")
        file.write_bytes(rng.choice(BYTES)(file.read_bytes(), rng))
        source = opened()
    decoded = [decode(source, i) for i in range(min(8, len(source)))]  # type: ignore[arg-type]
    for sample in decoded:
        if isinstance(sample, BadSample) and "\n" in sample.reason:
            raise AssertionError(f"more than a line: {sample.reason}")
    return "bad" if any(isinstance(s, BadSample) for s in decoded) else "good"


def child(first: int, stop: int, seed: int, data: str, outside: str, port: int) -> None:
    """Run cases one after the other; says on stdout which begins, and how it ended."""
    bench = Bench(seeds_of(Path(data)), Path(outside), port)
    logging.getLogger().addHandler(logging.NullHandler())
    reached: list[str] = []

    def watch(event: str, args: tuple[object, ...]) -> None:
        if event == "open" and watching and str(args[0]).startswith(str(bench.outside)):
            reached.append(f"opened {args[0]}")
        elif event == "socket.connect" and watching:
            reached.append(f"connected to {args[1]}")

    watching = False
    sys.addaudithook(watch)
    started = False
    for case in range(first, stop):
        rng = random.Random(f"{seed} {case}")
        folder = Path(tempfile.mkdtemp(dir=bench.outside.parent))
        print(f"begin {case}", flush=True)
        (way,) = rng.choices([w for w, _ in WAYS], [p for _, p in WAYS])
        what = way(bench, folder, rng)
        if not started:  # the libraries are imported by the first case
            started = True
            attempt(*_warm(bench))
            used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY_BYTES,) * 2)
        reached.clear()
        watching = True
        try:
            result = attempt(folder, what, rng)
        except ValueError as e:
            result = "bad" if "\n" not in str(e) else f"more than a line: {e}"
        except Exception:
            result = traceback.format_exc()
        watching = False
        if reached:
            result = "; ".join(reached)
        print(json.dumps([case, way.__name__, result]), flush=True)
        shutil.rmtree(folder, ignore_errors=True)


def _warm(bench: Bench) -> tuple[Path, dict[str, object], random.Random]:
    folder = Path(tempfile.mkdtemp(dir=bench.outside.parent))
    kind, suffix, data = bench.seeds[0]
    (folder / f"m{suffix}").write_bytes(data)
    (folder / "dataset.json").write_text(json.dumps([record(kind, f"m{suffix}")]))
    return folder, {"path": str(folder)}, random.Random(0)


def run(
    cases: range,
    seed: int,
    data: Path,
    seconds: float,
    tell: Callable[[Counter[str], list[Finding]], None] = lambda *_: None,
) -> tuple[Counter[str], list[Finding]]:
    """Counts by "KIND RESULT", and findings; `tell` gets those so far after every case."""
    counts: Counter[str] = Counter()
    findings: list[Finding] = []
    end_s = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as made, socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        outside = Path(made) / "outside"
        outside.mkdir()
        case = cases.start
        while case < cases.stop and time.monotonic() < end_s:
            arguments = [str(data), str(outside), str(server.getsockname()[1])]
            process = subprocess.Popen(
                [sys.executable, __file__, "--child", str(case), str(cases.stop), str(seed),
                 *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
            assert process.stdout is not None
            buffer, why = b"", ""
            while time.monotonic() < end_s:
                if not select.select([process.stdout], [], [], DEADLINE_S)[0]:
                    why = f"took longer than {DEADLINE_S:g} s"
                    break
                part = os.read(process.stdout.fileno(), 1 << 16)
                if not part:
                    break
                *lines, buffer = (buffer + part).split(b"\n")
                for line in lines:
                    if line.startswith(b"begin"):
                        case = int(line.split()[1])
                        continue
                    case, way, result = json.loads(line)
                    counts[f"{way} {result if result in ('good', 'bad') else 'finding'}"] += 1
                    if result not in ("good", "bad"):
                        findings.append(Finding(case, way, result))
                    case += 1
                    tell(counts, findings)
                try:
                    server.accept()[0].close()
                    findings.append(Finding(case, "request", "somebody connected"))
                except BlockingIOError:
                    pass
            process.kill()
            _, errors = process.communicate()
            if case < cases.stop and time.monotonic() < end_s:
                said = errors.decode(errors="replace")[-1500:]
                why = why or f"the process ended with {process.returncode}: {said}"
                findings.append(Finding(case, "death or hang", why))
                counts["death or hang finding"] += 1
                case += 1
                tell(counts, findings)
    return counts, findings


def ended(counts: Mapping[str, int], result: str) -> int:
    return sum(n for key, n in counts.items() if key.endswith(f" {result}"))


def told(file: Path | None, counts: Counter[str], findings: Sequence[Finding]) -> None:
    """Write the numbers so far, and say them now and then."""
    good, bad = (ended(counts, result) for result in ("good", "bad"))
    write_json(file, {"cases": counts.total(), "good": good, "bad": bad, "findings": findings})
    if counts.total() % SAID_EVERY == 0:
        print(f"{counts.total()} cases, {len(findings)} findings", file=sys.stderr, flush=True)


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seconds", type=float, default=3600, help="stop after so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run this case alone")
    parser.add_argument("--data", type=Path, default=SHARED)
    add_json(parser)
    args = parser.parse_args()
    cases = range(args.first, args.first + args.cases)
    cases = cases if args.only is None else range(args.only, args.only + 1)
    counts, findings = run(cases, args.seed, args.data, args.seconds, partial(told, args.json))
    table = Table("what is mutated", "good", "bad", "findings")
    for way in sorted({key.rpartition(" ")[0] for key in counts}):
        table.add_row(way, *(str(counts[f"{way} {r}"]) for r in ("good", "bad", "finding")))
    good, bad = (ended(counts, result) for result in ("good", "bad"))
    table.add_row("all", str(good), str(bad), str(len(findings)))
    Console().print(table)
    for finding in findings[:20]:
        print(f"case {finding.case} ({finding.what}): {finding.detail[-1500:]}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        first, stop, seed, data, outside, port = sys.argv[2:]
        child(int(first), int(stop), int(seed), data, outside, int(port))
    else:
        main()
