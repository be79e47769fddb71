"""Mutated files for `fuzz_data.py`: every case is a folder, drawn from its own number."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LARGEST_SEED = 300_000  # bytes: small files are mutated faster
KINDS = {"images": "image", "videos": "video", "audio": "audio"}
EXTREMES = [0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1]
HOSTILE: list[Any] = [
    None, True, 0, -1, 2**31, 2**63, 1e308, "", "\0", "a" * 100_000, "<image>" * 2000, [], {}, [[]],
    [None] * 5000, {"a": {"a": {}}}, "\ud7ff\U0010ffff", "{{ x }}", "<|im_end|>",
]  # fmt: skip


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

    def table(self, folder: Path, rng: random.Random) -> dict[str, object]:
        """A mutated Parquet or Arrow file of rows with a medium inside, or named."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        kind, suffix, data = rng.choice(self.seeds)
        (folder / f"m{suffix}").write_bytes(data)
        media = [{"bytes": data, "path": f"m{suffix}"}, {"bytes": None, "path": f"m{suffix}"}, None]
        rows = [{"id": k, kind: media[k % 3], "conversations": talk(f"<{kind}>" * (k % 3 < 2))}
                for k in range(6)]  # fmt: skip
        made, out = pa.Table.from_pylist(rows), io.BytesIO()
        form = rng.choice(["parquet", "stream", "file"])
        if form == "parquet":
            pressed = rng.choice(["none", "snappy", "zstd", "gzip"])
            pq.write_table(made, out, row_group_size=rng.choice([2, 6]), compression=pressed)
        else:
            with (pa.ipc.new_stream if form == "stream" else pa.ipc.new_file)(
                out, made.schema
            ) as to:
                to.write_table(made, max_chunksize=rng.choice([2, 6]))
        file = folder / ("t.parquet" if form == "parquet" else "t.arrow")
        file.write_bytes(rng.choice(BYTES)(out.getvalue(), rng))
        return {"path": str(file)}

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
        from dflop_jax.records.files import save

        save(Config(), folder / "config.json")
        data = (folder / "config.json").read_bytes()
        (folder / "config.json").write_bytes(mutated_json(json.loads(data), rng))
        return {"config": str(folder / "config.json")}


WAYS: list[tuple[Callable[[Bench, Path, random.Random], dict[str, object]], float]] = [
    (Bench.medium, 0.52), (Bench.paths, 0.06), (Bench.records, 0.1), (Bench.shard, 0.07),
    (Bench.table, 0.1),
    (Bench.mixture, 0.04), (Bench.tokenizer, 0.03), (Bench.index, 0.06), (Bench.config, 0.02),
]  # fmt: skip


def seeds_of(data: Path) -> list[tuple[str, str, bytes]]:
    """Small media of the shared data."""
    return [
        (kind, f.suffix, f.read_bytes())
        for name, kind in KINDS.items()
        for f in sorted((data / name).iterdir())
        if 0 < f.stat().st_size <= LARGEST_SEED
    ]
