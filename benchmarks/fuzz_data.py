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
import io
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
import tarfile
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

DEADLINE_S = 120.0  # for one case, on a busy machine
MEMORY_BYTES = 2 << 30
LARGEST_SEED = 300_000  # bytes: small files are mutated faster
KINDS = {"images": "image", "videos": "video", "audio": "audio"}
EXTREMES = [0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1]
SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
HOSTILE = [
    None, True, 0, -1, 2**31, 2**63, 1e308, "", "\0", "a" * 100_000, "<image>" * 2000, [], {}, [[]],
    [None] * 5000, {"a": {"a": {}}}, "\ud7ff\U0010ffff", "{{ x }}", "<|im_end|>",
]  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """A case that did something else than come or be bad; `--only` runs it again."""

    case: int
    what: str
    detail: str


# Mutators of bytes, and of what JSON holds.


def flipped(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice([1, 4, 30])):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def truncated(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def extreme(data: bytes, rng: random.Random) -> bytes:
    """An extreme number where a header may stand."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 2, 5])):
        size, order = rng.choice([1, 2, 4, 8]), rng.choice(["little", "big"])
        near = min(len(data) - size, rng.choice([64, 600, 5000]))
        place = rng.randrange(max(1, near))
        place = place if rng.random() < 0.7 else max(0, len(data) - size - place)
        number = rng.choice(EXTREMES) % 256**size
        changed[place : place + size] = number.to_bytes(size, order)
    return bytes(changed)


def spliced(data: bytes, rng: random.Random) -> bytes:
    cut, start = rng.randrange(len(data)), rng.randrange(len(data))
    return data[:cut] + data[start : start + rng.choice([10, 1000, 10**6])] + data[cut:]


def doubled(data: bytes, rng: random.Random) -> bytes:
    return data + data[rng.randrange(len(data)) :]


BYTES = [flipped, truncated, extreme, spliced, doubled]


def grown(value: object, rng: random.Random) -> object:
    """A tree with one node replaced."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: grown(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        k = rng.randrange(len(value))
        return [*value[:k], grown(value[k], rng), *value[k + 1 :]]
    return rng.choice(HOSTILE)


def mutated_json(value: object, rng: random.Random) -> bytes:
    choice = rng.random()
    if choice < 0.05:
        return b"[" * 100_000
    if choice < 0.65:
        for _ in range(rng.choice([1, 1, 3])):
            value = grown(value, rng)
        return json.dumps(value).encode()
    return rng.choice(BYTES)(json.dumps(value).encode(), rng)


# Cases: each writes a folder, and says what is opened of it.


def talk(tag: str) -> list[dict[str, str]]:
    return [{"from": "human", "value": f"{tag} What is it?"}, {"from": "gpt", "value": "This."}]


def record(kind: str, name: str) -> dict[str, object]:
    return {"id": "a", kind: name, "conversations": talk(f"<{kind}>")}


@dataclass(frozen=True)
class Bench:
    """Seeds, and what no case may reach."""

    seeds: list[tuple[str, str, bytes]]  # kind, ending, bytes
    outside: Path
    port: int

    def medium(self, folder: Path, rng: random.Random) -> dict[str, object]:
        """One mutated file of a medium in a record."""
        kind, suffix, data = rng.choice(self.seeds)
        choice = rng.random()
        if choice < 0.05:
            kind = rng.choice(list(KINDS.values()))  # swapped types
        elif choice < 0.1:
            data = f"#EXTM3U\n#EXTINF:5,\nhttp://127.0.0.1:{self.port}/a.ts\n".encode()
        elif choice < 0.15:
            data = data[: rng.randrange(len(data))] + rng.choice(self.seeds)[2]
        else:
            data = rng.choice(BYTES)(data, rng)
        (folder / f"m{suffix}").write_bytes(data)
        (folder / "dataset.json").write_text(json.dumps([record(kind, f"m{suffix}")]))
        return {"path": str(folder)}

    def paths(self, folder: Path, rng: random.Random) -> dict[str, object]:
        """A record that names a file elsewhere."""
        kind, suffix, data = rng.choice(self.seeds)
        target = self.outside / f"m{suffix}"
        target.write_bytes(data)
        (folder / "link").symlink_to(target)
        (folder / "way").symlink_to(self.outside)
        os.mkfifo(folder / "pipe")
        name = rng.choice([str(target), f"../{self.outside.name}/m{suffix}", "link", "pipe",
                           f"way/m{suffix}", "/dev/zero", "/proc/self/mem", "~/x", "file:///etc/passwd",
                           f"http://127.0.0.1:{self.port}/a.png", "a" * 5000, "a\0b"])  # fmt: skip
        (folder / "dataset.json").write_text(json.dumps([record(kind, name)]))
        return {"path": str(folder)}

    def records(self, folder: Path, rng: random.Random) -> dict[str, object]:
        good: list[object] = [record("image", "m.png"), {"id": 1, "conversations": talk("")}]
        if rng.random() < 0.5:
            (folder / "d.json").write_bytes(mutated_json(good, rng))
            return {"path": str(folder / "d.json")}
        lines = [mutated_json(r, rng) if rng.random() < 0.5 else json.dumps(r).encode()
                 for r in good * 3]  # fmt: skip
        (folder / "d.jsonl").write_bytes(b"\n".join(lines))
        return {"path": str(folder / "d.jsonl")}

    def shard(self, folder: Path, rng: random.Random) -> dict[str, object]:
        kind, suffix, data = rng.choice(self.seeds)
        buffer = io.BytesIO()
        style = rng.choice([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
        members = {
            f"a{suffix}": data,
            "a.json": json.dumps(record(kind, f"a{suffix}")).encode(),
            "b" * rng.choice([1, 150 if style != tarfile.USTAR_FORMAT else 90]) + ".txt": b"text",
        }
        with tarfile.open(fileobj=buffer, mode="w", format=style) as tar:
            for name, body in members.items():
                info = tarfile.TarInfo(name)
                info.size = len(body)
                tar.addfile(info, io.BytesIO(body))
        (folder / "s.tar").write_bytes(rng.choice(BYTES)(buffer.getvalue(), rng))
        return {"path": str(folder / "s.tar")}

    def mixture(self, folder: Path, rng: random.Random) -> dict[str, object]:
        (folder / "d.json").write_text(json.dumps([{"conversations": talk("")}]))
        part = {"path": "d.json", "weight": 2, "subset": "first:30%", "root": "."}
        value = {"parts": [part, "d.json"]}
        choice = rng.random()
        text = mutated_json(value, rng)
        if choice < 0.2:
            text = b"a: &a [x,x]\n" + b"".join(
                b"%c: &%c [*%c,*%c]\n" % (c + 1, c + 1, c, c) for c in range(97, 120)
            ) + b"parts: *x\n"  # fmt: skip
        elif choice < 0.3:
            text = f"parts: [s-{{0..{rng.choice(EXTREMES)}}}.tar]".encode()
        (folder / "m.yaml").write_bytes(text)
        return {"path": str(folder / "m.yaml")}

    def tokenizer(self, folder: Path, rng: random.Random) -> dict[str, object]:
        from tests.data.text.test_chat import write

        made = self.outside.parent / "model"  # once
        shutil.copytree(made if made.exists() else write(made), folder / "model")
        (folder / "d.json").write_text(json.dumps([{"conversations": talk("")}]))
        file = rng.choice([f for f in sorted((folder / "model").iterdir()) if f.is_file()])
        data = file.read_bytes()
        if file.suffix == ".json":
            file.write_bytes(mutated_json(json.loads(data), rng))
        else:
            file.write_bytes(rng.choice(BYTES)(data, rng))
        return {"path": str(folder / "d.json"), "tokenizer": str(folder / "model")}

    def index(self, folder: Path, rng: random.Random) -> dict[str, object]:
        """The index of a good dataset, mutated after it was made."""
        kind, suffix, data = rng.choice(self.seeds)
        (folder / f"m{suffix}").write_bytes(data)
        (folder / "dataset.json").write_text(json.dumps([record(kind, f"m{suffix}")]))
        return {"path": str(folder), "mutate": rng.randrange(2**31)}

    def config(self, folder: Path, rng: random.Random) -> dict[str, object]:
        from dflop_jax import Config
        from dflop_jax.record_files import save

        save(Config(), folder / "config.json")
        data = (folder / "config.json").read_bytes()
        (folder / "config.json").write_bytes(mutated_json(json.loads(data), rng))
        return {"config": str(folder / "config.json")}


WAYS: list[tuple[Callable[[Bench, Path, random.Random], dict[str, object]], float]] = [
    (Bench.medium, 0.62), (Bench.paths, 0.06), (Bench.records, 0.1), (Bench.shard, 0.07),
    (Bench.mixture, 0.04), (Bench.tokenizer, 0.03), (Bench.index, 0.06), (Bench.config, 0.02),
]  # fmt: skip


def attempt(folder: Path, what: dict[str, object], rng: random.Random) -> str:
    """Do what a run does with a folder: "good" when samples came, "bad" when it was refused."""
    from dflop_jax import Config
    from dflop_jax.data import BadSample, MediaSpec, make_source
    from dflop_jax.data.decoder import decode
    from dflop_jax.data.media.mel import MelSpec
    from dflop_jax.record_files import load

    if "config" in what:
        load(Config, str(what["config"]))
        return "good"
    from dflop_jax.config import DataConfig

    config = DataConfig(
        path=str(what["path"]), tokenizer=str(what.get("tokenizer", "")), workers=1,
        max_tokens=100_000, max_frames=4, max_bad_fraction=1.0,
    )  # fmt: skip
    spec = MediaSpec(32, 4, rng.choice(["tiles", "anyres", "dynamic"]), sound=MelSpec())

    def opened() -> object:
        return make_source(config, spec, index_dir=folder, vocab_size=None)

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


def seeds_of(data: Path) -> list[tuple[str, str, bytes]]:
    """Small media of the shared data."""
    return [
        (kind, f.suffix, f.read_bytes())
        for name, kind in KINDS.items()
        for f in sorted((data / name).iterdir())
        if 0 < f.stat().st_size <= LARGEST_SEED
    ]


def run(cases: range, seed: int, data: Path, seconds: float) -> tuple[Counter[str], list[Finding]]:
    """Counts by "KIND RESULT", and findings."""
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
            assert process.stderr is not None
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
                try:
                    server.accept()[0].close()
                    findings.append(Finding(case, "request", "somebody connected"))
                except BlockingIOError:
                    pass
            process.kill()
            process.wait()
            if case < cases.stop and time.monotonic() < end_s:
                said = process.stderr.read().decode(errors="replace")[-1500:]
                why = why or f"the process ended with {process.returncode}: {said}"
                findings.append(Finding(case, "death or hang", why))
                counts["death or hang finding"] += 1
                case += 1
    return counts, findings


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
    parser.add_argument("--json", type=Path, help="write the numbers there")
    args = parser.parse_args()
    cases = range(args.first, args.first + args.cases)
    cases = cases if args.only is None else range(args.only, args.only + 1)
    counts, findings = run(cases, args.seed, args.data, args.seconds)
    table = Table("what is mutated", "good", "bad", "findings")
    for way in sorted({key.rpartition(" ")[0] for key in counts}):
        table.add_row(way, *(str(counts[f"{way} {r}"]) for r in ("good", "bad", "finding")))
    good, bad = (sum(n for k, n in counts.items() if k.endswith(r)) for r in (" good", " bad"))
    table.add_row("all", str(good), str(bad), str(len(findings)))
    Console().print(table)
    for finding in findings[:20]:
        print(f"case {finding.case} ({finding.what}): {finding.detail[-1500:]}")
    if args.json:
        numbers = {"cases": counts.total(), "good": good, "bad": bad,
                   "findings": [asdict(f) for f in findings]}  # fmt: skip
        args.json.write_text(json.dumps(numbers, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        first, stop, seed, data, outside, port = sys.argv[2:]
        child(int(first), int(stop), int(seed), data, outside, int(port))
    else:
        main()
