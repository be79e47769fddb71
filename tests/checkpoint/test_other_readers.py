"""Checkpoints read without this program: by numpy alone, as docs/checkpoints.md shows, and as the
safetensors files that they are."""

import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from dflop_jax.checkpoint.format import SAFETENSORS
from tests.checkpoint.store_cases import (
    random_case,
    same,
    save,
)

DOCS = (Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md").read_text()
(READER,) = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
FOLDER = "runs/run/checkpoints/00000200"


def read_as_documented(folder: Path) -> dict[str, np.ndarray]:
    names: dict[str, object] = {}
    exec(READER.replace(f'"{FOLDER}"', repr(str(folder))), names)
    return names["leaves"]


@pytest.mark.parametrize("seed", range(6))
def test_numpy_alone_reads_every_leaf(store, seed):
    case = random_case(seed, 1 + seed % 3, n_arrays=12)
    folder = save(store, seed, case)
    leaves = read_as_documented(folder)
    assert leaves.keys() == case.arrays.keys()
    assert all(same(leaves[name], array) for name, array in case.arrays.items())


def test_the_documented_reader_refuses_what_is_lost_or_damaged(store):
    folder = save(store, 1, random_case(1, n_processes=2))
    for file in folder.iterdir():
        data = file.read_bytes()
        file.unlink()
        with pytest.raises(FileNotFoundError):
            read_as_documented(folder)
        middle = len(data) // 2
        file.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
        with pytest.raises(AssertionError):
            read_as_documented(folder)
        file.write_bytes(data)
    read_as_documented(folder)


def joined(folder: Path) -> dict[tuple[str, str], bytearray]:
    """By (array, type): the elements of all safetensors files, put where their names say."""
    shapes = {
        a["name"]: a["shape"] for a in json.loads((folder / "manifest.json").read_text())["arrays"]
    }
    whole: dict[str, np.ndarray] = {}
    for file in folder.glob("process-*"):
        for text, tensor in safetensors.deserialize(file.read_bytes()):
            name, spans = re.fullmatch(r"(.*?)(?:\[(.*)\])?", text).groups()
            shape = shapes[name]
            box = tuple(slice(*map(int, s.split(":"))) for s in (spans or "").split(",") if s)
            there = tensor["shape"][: len(shape)]  # without that of an element's bytes
            element = f"V{len(tensor['data']) // int(np.prod(there))}"
            array = whole.setdefault(name, np.zeros(shape, element))
            array[(*box, ...)] = np.frombuffer(bytes(tensor["data"]), element).reshape(there)
    return whole


@pytest.mark.parametrize("seed", range(6))
def test_safetensors_reads_every_file(store, seed):
    case = random_case(seed, 2, n_arrays=12)
    whole = joined(save(store, seed, case))
    for name, array in case.arrays.items():
        if array.size:
            assert whole[name].shape == array.shape
            assert whole[name].tobytes() == array.tobytes()


@pytest.mark.parametrize("dtype", SAFETENSORS)
def test_types_have_the_names_that_safetensors_gives_them(dtype):
    kind = getattr(ml_dtypes, dtype, dtype)
    data = safetensors.numpy.save({"x": np.zeros(2, kind)})
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert header["x"]["dtype"] == SAFETENSORS[dtype]
