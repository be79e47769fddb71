"""What saving costs: this program's files, zarr v3 by TensorStore, and Orbax, of the same state.

Command:  python benchmarks/save_formats.py [--gb 2] [--processes 4] [--folder DIR] [--json FILE]
Minutes:  about 8 for 2 GB on two cores and one disk
Expected: zarr takes 1.2 to 2 times this program's CPU seconds, Orbax 3 times; wall seconds are the
          disk's and vary by a third

Parameters and two moments of a decoder in float32, cut over data ranks, one to a process. For zarr
that is the cheapest case: every shard is one process's piece, so that nothing is sent between
processes. Methods take turns; medians of `--repeats` after a first round that does not count.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
import tensorstore as ts
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from json_rows import Rows, add_json, as_rows
from rich.console import Console
from rich.table import Table

from dflop_jax import Config, ModelConfig
from dflop_jax.checkpoint.store import ArrayPiece, ArraySpec, CheckpointStore, WrittenPart
from dflop_jax.cluster.launch import launch
from dflop_jax.cluster.peers import Peers
from dflop_jax.train.prepare import set_up

LAYERS, WIDTH, KV_WIDTH = 9, 1024, 256
ATTENTION_BYTES = 12 * LAYERS * WIDTH * 2 * (WIDTH + KV_WIDTH)
BYTES_OF_A_COLUMN = 12 * WIDTH * (3 * LAYERS + 8)  # of MLP and embedding, see `_shapes`
INNER_BYTES = {"zarr, chunks of 1 MiB": 1 << 20, "zarr, chunks of 16 MiB": 16 << 20,
               "zarr, a chunk a file": 1 << 60}  # fmt: skip
PENDING = 4  # arrays that TensorStore writes at once


@dataclass(frozen=True)
class State:
    """Global arrays by name, and the piece of each that this process has."""

    arrays: Mapping[str, jax.Array]
    peers: Peers

    @classmethod
    def make(cls, gb: float, devices: list[jax.Device], peers: Peers) -> State:
        columns = (gb * 1e9 - ATTENTION_BYTES) / BYTES_OF_A_COLUMN
        hidden = max(64, round(columns / 64) * 64)
        rng, arrays = np.random.default_rng(peers.process), {}
        mesh = Mesh(np.array(devices), ("data",))
        for name, shape in _shapes(hidden).items():
            dim = len(shape) - 2 if len(shape) > 1 else 0
            piece = [n // (len(devices) if i == dim else 1) for i, n in enumerate(shape)]
            values = rng.standard_normal(piece, np.float32)
            sharding = NamedSharding(mesh, P(*[None] * dim, "data"))
            shards = [jax.device_put(values, devices[peers.process])]
            arrays[name] = jax.make_array_from_single_device_arrays(shape, sharding, shards)
        return cls(arrays, peers)

    def piece(self, name: str) -> tuple[tuple[slice, ...], np.ndarray]:
        """Where this process's piece lies, and its elements."""
        (shard,) = self.arrays[name].addressable_shards
        spans = (slice(*s.indices(n)[:2]) for s, n in zip(shard.index, self.arrays[name].shape))
        return tuple(spans), np.asarray(shard.data)


def _shapes(hidden: int) -> dict[str, tuple[int, ...]]:
    one = {"embedding": (8 * hidden, WIDTH), "norm": (WIDTH,)}
    widths = {"q": WIDTH, "k": KV_WIDTH, "v": KV_WIDTH, "o": WIDTH, "gate": hidden, "up": hidden}
    one |= {name: (LAYERS, WIDTH, n) for name, n in widths.items()}
    one["down"] = (LAYERS, hidden, WIDTH)
    kinds = ("params", "mu", "nu")
    return {f"{kind}/{name}": shape for kind in kinds for name, shape in one.items()}


def save_here(state: State, folder: Path, key: str) -> None:
    """As the program saves."""
    peers, store = state.peers, CheckpointStore(folder)
    if peers.is_hub:
        store.prepare(1)
    peers.barrier(f"{key}/begin")
    specs = [ArraySpec(n, a.shape, a.dtype.name) for n, a in state.arrays.items()]
    pieces = ((name, *state.piece(name)) for name in state.arrays)
    placed = [ArrayPiece(name, tuple(s.start for s in box), a) for name, box, a in pieces]
    part = store.write(1, specs, placed, peers.process)
    written = peers.gather(f"{key}/part", msgspec.json.encode(part))
    if peers.is_hub:
        store.commit(1, specs, [msgspec.json.decode(p, type=WrittenPart) for p in written], {})


def save_zarr(state: State, folder: Path, key: str, inner_bytes: int) -> None:
    """A zarr v3 array of each, a shard file of each piece; no marker, no commit."""
    peers = state.peers

    specs = {name: _zarr_spec(state, name, folder / name, inner_bytes) for name in state.arrays}
    if peers.is_hub:
        for made in [ts.open(spec, create=True) for spec in specs.values()]:
            made.result()
    peers.barrier(f"{key}/made")
    pending: list[Any] = []
    for name, spec in specs.items():
        box, values = state.piece(name)
        array = ts.open(spec, open=True, assume_metadata=True).result()
        pending.append(array[box].write(values, can_reference_source_data_indefinitely=True))
        if len(pending) == PENDING:
            pending.pop(0).result()
    for write in pending:
        write.result()


def _zarr_spec(state: State, name: str, path: Path, inner_bytes: int) -> dict[str, Any]:
    shape = state.piece(name)[1].shape
    codecs: list[Any] = [{"name": "bytes", "configuration": {"endian": "little"}}, "crc32c"]
    if (inner := _inner(shape, inner_bytes)) != shape:
        chunks = {"chunk_shape": inner, "codecs": codecs, "index_codecs": codecs}
        codecs = [{"name": "sharding_indexed", "configuration": chunks}]
    grid = {"name": "regular", "configuration": {"chunk_shape": shape}}
    whole = {"shape": state.arrays[name].shape, "data_type": "float32", "fill_value": 0}
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{path}/"},
        "metadata": {**whole, "codecs": codecs, "chunk_grid": grid},
    }


def _inner(shape: tuple[int, ...], most_bytes: int) -> tuple[int, ...]:
    """A chunk that divides the shape: its first dims are cut before the next ones are."""
    inner = list(shape)
    for d, n in enumerate(shape):
        for ways in range(1, n + 1):
            if n % ways == 0:
                inner[d] = n // ways
                if 4 * np.prod(inner) <= most_bytes:
                    return tuple(inner)
    return tuple(inner)


def save_orbax(state: State, folder: Path, key: str) -> None:
    """As its PyTree checkpointer saves by default."""
    import orbax.checkpoint as ocp

    with ocp.PyTreeCheckpointer() as saver:
        saver.save(folder / "1", dict(state.arrays))


METHODS: dict[str, Callable[[State, Path, str], None]] = {
    "this program": save_here,
    **{name: partial(save_zarr, inner_bytes=n) for name, n in INNER_BYTES.items()},
    "Orbax": save_orbax,
}


def measure(args: argparse.Namespace) -> None:
    """Let the methods take turns; process 0 shows and writes what they took."""
    place = set_up(Config(model=ModelConfig(size="nano")))
    peers = place.peers
    state = State.make(args.gb, place.devices, peers)
    folder = Path(args.folder)
    took: dict[str, list[list[float]]] = {name: [] for name in METHODS}
    files: dict[str, list[int]] = {}
    for turn in range(args.repeats + 1):
        for name, save in METHODS.items():
            key = f"{turn}/{name}"
            if peers.is_hub:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                os.sync()
            peers.barrier(f"{key}/start")
            start_s, start_cpu_s = time.perf_counter(), _cpu_s()
            save(state, folder, key)
            cpu_s = _cpu_s() - start_cpu_s
            peers.barrier(f"{key}/end")
            wall_s = time.perf_counter() - start_s
            (all_cpu_s,) = peers.sums(f"{key}/cpu", [cpu_s])
            if peers.is_hub:
                sizes = [f.stat().st_size for f in folder.rglob("*") if f.is_file()]
                files[name] = [len(sizes), sum(sizes)]
                took[name] += [[wall_s, all_cpu_s]] if turn else []
    if peers.is_hub:
        shutil.rmtree(folder)
        show(args.json, took, files)
    peers.barrier("shown")
    place.peers.close()


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def show(file: Path | None, took: Mapping[str, list[list[float]]], files: Any) -> None:
    """Print the medians beside this program's, and write them."""
    rows = Rows(file, as_rows)
    table = Table("method", "wall s", "ratio", "CPU s", "ratio", "files", "bytes")
    wall, cpu = (statistics.median(s) for s in zip(*next(iter(took.values())), strict=True))
    for name, seconds in took.items():
        wall_s, cpu_s = (statistics.median(s) for s in zip(*seconds, strict=True))
        n_files, n_bytes = files[name]
        rows.append({"method": name, "wall_s": wall_s, "cpu_s": cpu_s, "files": n_files,
                     "bytes": n_bytes, "wall_ratio": wall_s / wall, "cpu_ratio": cpu_s / cpu,
                     "bytes_per_s": n_bytes / wall_s})  # fmt: skip
        table.add_row(name, f"{wall_s:.2f}", f"{wall_s / wall:.2f}", f"{cpu_s:.2f}",
                      f"{cpu_s / cpu:.2f}", str(n_files), f"{n_bytes:,}")  # fmt: skip
    Console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_json(parser)
    parser.add_argument("--gb", type=float, default=2.0, help="GB of state, of all processes")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--folder", default="", help="a folder that is made and removed")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        measure(args)
        return 0
    with tempfile.TemporaryDirectory(dir=args.folder or None) as scratch:
        command = ["python", __file__, "--worker", "--folder", f"{scratch}/saves"]
        command += ["--gb", str(args.gb), "--repeats", str(args.repeats)]
        command += ["--json", str(args.json)] if args.json else []
        return launch(command, args.processes, devices_per_process=1).exit_code


if __name__ == "__main__":
    sys.exit(main())
