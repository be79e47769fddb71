"""Time and memory to index Parquet datasets: headers and text alone, tokenized, nothing decoded.

Command:  python benchmarks/index_parquet.py --json index_parquet.json
Minutes:  under 2 on 2 cores
Expected: at most 120 s and 1 GB for each dataset, of all processes together

Two datasets are written here: a million rows of messages whose pictures are file names, and 20,000
rows with a picture of 50 kB in each. The index is made in two processes, as runs do it; then 200
records are read again in random order. Tokenizing is included, by bytes or, with --tokenizer
FOLDER, by a published one.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from json_rows import add_json, write_json
from PIL import Image
from rich.console import Console
from rich.table import Table

from dflop_jax.config import DataConfig
from dflop_jax.data import MediaSpec, make_source
from dflop_jax.data.datasets.blob import open_media
from dflop_jax.data.datasets.located import Located
from dflop_jax.data.datasets.readers import open_reader
from dflop_jax.data.datasets.shape_index import load_index

PICTURES = 200
SPEC = MediaSpec.of({"vision": {"tile_px": 32, "tokens_per_tile": 4}}, {})
READ_AGAIN = 200
AT_ONCE = 50_000  # rows written at a time
MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
EMBEDDED = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def talk(k: int, words: int) -> list[dict[str, str]]:
    answer = "It shows a " + "very " * words + f"good number {k}."
    return [{"role": "user", "content": "<image>\nWhat is this?"},
            {"role": "assistant", "content": answer}]  # fmt: skip


def write_names(folder: Path, n: int) -> None:
    """Rows whose pictures are files."""
    rng = np.random.default_rng(0)
    for k in range(PICTURES):
        width, height = rng.integers(100, 3000, 2).tolist()
        Image.new("L", (width, height)).save(folder / f"{k}.png", compress_level=1)
    schema = pa.schema([("id", pa.int64()), ("image", pa.string()), ("messages", MESSAGES)])
    with pq.ParquetWriter(folder / "train-00000-of-00001.parquet", schema) as out:
        for first in range(0, n, AT_ONCE):
            rows = range(first, min(n, first + AT_ONCE))
            columns = [rows, [f"{k % PICTURES}.png" for k in rows],
                       [talk(k, int(rng.integers(0, 40))) for k in rows]]  # fmt: skip
            out.write_table(pa.table(columns, schema=schema))


def write_embedded(folder: Path, n: int) -> None:
    """Rows with 50 kB of a picture in them."""
    rng = np.random.default_rng(0)
    noise = Image.fromarray(rng.integers(0, 256, (128, 128, 3), np.uint8))
    png = io.BytesIO()
    noise.save(png, "png")
    schema = pa.schema([("id", pa.int64()), ("images", pa.list_(EMBEDDED)), ("messages", MESSAGES)])
    with pq.ParquetWriter(folder / "train-00000-of-00001.parquet", schema) as out:
        for first in range(0, n, 1000):
            rows = range(first, min(n, first + 1000))
            pictures = [[{"bytes": png.getvalue() + bytes(k % 999), "path": f"{k}.png"}]
                        for k in rows]  # fmt: skip
            columns = [rows, pictures, [talk(k, int(rng.integers(0, 40))) for k in rows]]
            out.write_table(pa.table(columns, schema=schema))


def memory_bytes() -> int:
    """What this process and its descendants hold; pages that several share count once."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    total, left = 0, [os.getpid()]
    while left:
        process = left.pop()
        left += children.get(process, [])
        with suppress(OSError, StopIteration):
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
            total += next(int(s.split()[1]) << 10 for s in lines if s.startswith("Pss:"))
    return total


@contextmanager
def peak(numbers: dict[str, float], name: str) -> Iterator[None]:
    """Seconds, and the most memory seen meanwhile, of what runs inside."""
    done, start_s = threading.Event(), time.perf_counter()
    most = [0]

    def watch() -> None:
        while not done.wait(2):
            most[0] = max(most[0], memory_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        numbers[f"{name}_s"] = time.perf_counter() - start_s
        done.set()
        watcher.join()
        numbers[f"{name}_peak_bytes"] = most[0]


def index(path: Path, tokenizer: str, numbers: dict[str, float], name: str) -> None:
    config = DataConfig(path=str(path), tokenizer=tokenizer, max_tokens=100_000)
    with peak(numbers, name):
        source = make_source(config, SPEC, index_dir=path)
    assert len(source) == numbers[f"{name}_rows"]
    (table,) = [indexed.table for indexed in load_index(next(path.glob("index-*.npz"))).values()]
    numbers[f"{name}_text_tokens"] = int(table.text_tokens.sum())
    reader = open_reader(path)
    rows = np.random.default_rng(0).permutation(len(table))[:READ_AGAIN].tolist()
    start_s = time.perf_counter()
    for row in rows:
        ((_, medium),) = reader.read(Located("", row, 0, 0, 0)).media
        with open_media(medium) as file:
            file.read()
    numbers[f"{name}_random_read_s"] = (time.perf_counter() - start_s) / len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000, help="with file names; 0: none")
    parser.add_argument("--embedded", type=int, default=20_000, help="with bytes; 0: none")
    parser.add_argument("--tokenizer", default="", help="a model's folder; empty: bytes")
    add_json(parser)
    args = parser.parse_args()
    numbers: dict[str, float] = {"names_rows": args.rows, "embedded_rows": args.embedded}
    with tempfile.TemporaryDirectory() as made:
        for name, write in (("names", write_names), ("embedded", write_embedded)):
            if n_rows := int(numbers[f"{name}_rows"]):
                folder = Path(made) / name
                folder.mkdir()
                # in a process of its own: what it has freed would count as the index's memory
                writer = multiprocessing.get_context("spawn").Process(
                    target=write, args=(folder, n_rows)
                )
                writer.start()
                writer.join()
                assert writer.exitcode == 0
                index(folder, args.tokenizer, numbers, name)
                print(numbers, file=sys.stderr, flush=True)
                write_json(args.json, numbers)
    table = Table("", "value")
    for key, value in numbers.items():
        table.add_row(key, f"{value:.4g}" if key.endswith("_s") else f"{value:,.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
