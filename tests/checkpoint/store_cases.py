"""Checkpoints to save in tests: random arrays, cut into pieces for several processes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflop_jax.checkpoint.format import ArrayBox, ArraySpec
from dflop_jax.checkpoint.store import CheckpointReader, CheckpointStore

DTYPES = ["float32", "bfloat16", "int32", "uint32", "bool", "float16", "int64", "complex64"]
DTYPES += ["float8_e4m3fn"]


@dataclass(frozen=True)
class Case:
    """Arrays, their specs by name, and the pieces of each process."""

    specs: dict[str, ArraySpec]
    arrays: dict[str, np.ndarray]
    boxes: list[list[ArrayBox]]


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Any bit patterns, NaNs included."""
    like = np.empty(shape, dtype)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    return np.frombuffer(rng.bytes(like.nbytes), dtype).reshape(shape)


def cut(rng: np.random.Generator, start: list[int], stop: list[int]) -> list[tuple[list, list]]:
    """A box cut at random into boxes [start, stop)."""
    wide = [d for d, (a, b) in enumerate(zip(start, stop)) if b - a > 1]
    if not wide or rng.random() < 0.3:
        return [(start, stop)]
    d = int(rng.choice(wide))
    at = int(rng.integers(start[d] + 1, stop[d]))
    low, high = list(stop), list(start)
    low[d] = high[d] = at
    return cut(rng, start, low) + cut(rng, high, stop)


def random_case(
    seed: int, n_processes: int = 3, n_arrays: int = 6, most: int = 12, ranks: tuple = (0, 1, 2, 3)
) -> Case:
    """Dims of 0 to `most`; pieces in random order, each with one random process."""
    rng = np.random.default_rng(seed)
    case = Case({}, {}, [[] for _ in range(n_processes)])
    for n in range(n_arrays):
        shape = tuple(int(rng.integers(0, most + 1)) for _ in range(rng.choice(ranks)))
        spec = ArraySpec(f"params/{n}", shape, str(rng.choice(DTYPES)))
        array = random_array(rng, shape, spec.dtype)
        case.specs[spec.name] = spec
        case.arrays[spec.name] = array
        for low, high in cut(rng, [0] * len(shape), list(shape)):
            piece = ArrayBox(spec.name, tuple(low), array[(*map(slice, low, high), ...)])
            case.boxes[rng.integers(n_processes)].append(piece)
    for own in case.boxes:
        rng.shuffle(own)
    return case


def vector(n: int = 8, *, first: int = 0) -> Case:
    """Array "a", float32[n], on one process."""
    array = np.arange(first, first + n, dtype=np.float32)
    return alone("a", array)


def alone(name: str, array: np.ndarray) -> Case:
    """One array, on one process."""
    spec = ArraySpec(name, array.shape, array.dtype.name)
    return Case({name: spec}, {name: array}, [[ArrayBox(name, (0,) * array.ndim, array)]])


def save(store: CheckpointStore, step: int, case: Case, meta: dict[str, Any] | None = None) -> Path:
    """One save, every process in a thread of its own."""
    store.prepare(step)
    with ThreadPoolExecutor() as pool:
        parts = list(
            pool.map(lambda p: store.write(step, case.specs, p[1], p[0]), enumerate(case.boxes))
        )
    return store.commit(step, case.specs, parts, {} if meta is None else meta)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal to the bit."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def assert_holds(reader: CheckpointReader, case: Case) -> None:
    """The reader gives every array of the case whole."""
    assert set(reader.specs) == set(case.arrays)
    for name, array in case.arrays.items():
        assert same(reader.read(name, (0,) * array.ndim, array.shape), array), name
