"""Reading a folder into submeshes: every value in its place, no byte read twice."""

import dataclasses
import math
from functools import partial

import jax
import numpy as np
import pytest

from dflop_jax.records import SubmeshPlan
from dflop_jax.runtime.layout import make_segments
from dflop_jax.runtime.parameter_layout import owned_param_structs, param_zero_specs
from dflop_jax.weights import Folder, read, read_params, read_segment, write_folder
from dflop_jax.weights.read import read_slice, split_chunks
from models import hf

from ..runtime.plain import in_order, whole_of
from .conftest import LAYOUTS, MODEL, PLAN, held, random_params


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_slice(layout):
    rng = np.random.default_rng(0)
    file = rng.integers(0, 1000, layout.file_shape)
    parameter = file.reshape(layout.split).transpose(layout.order).reshape(layout.shape)
    for _ in range(20):
        index = tuple(tuple(sorted(rng.integers(0, n + 1, 2))) for n in layout.shape)
        found = read_slice(layout, index, lambda at: file[at])
        np.testing.assert_array_equal(found, parameter[tuple(slice(*r) for r in index)])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("limit", [1, 40, 100, 10**6])
@pytest.mark.parametrize("layers", [(0, 1), (1, 5), (2, 2)])
def test_pieces_are_the_whole(layout, limit, layers):
    index = tuple((0, n) for n in layout.shape)
    seen = np.zeros((5, *layout.shape), int)
    for (first, last), part in split_chunks(layout, index, layers, limit, 4):
        seen[first:last][(slice(None), *(slice(*r) for r in part))] += 1
        if len(layout.shape) == len(layout.order):
            rows = part[layout.order.index(0)]
            assert rows[1] - rows[0] == 1 or limit >= 4 * math.prod(b - a for a, b in part)
    assert (seen[slice(*layers)] == 1).all()
    assert seen.sum() == (layers[1] - layers[0]) * math.prod(layout.shape)


# The same modules on other meshes, with their parameters in pieces, most of them flat: the tower's
# of all data ranks, the LLM's of each block of 2.
IN_PIECES = PLAN.with_layout(
    submeshes=(SubmeshPlan("v", 0, 1, 3, 2), SubmeshPlan("a", 0, 1, 6, 1),
               SubmeshPlan("b", 0, 2, 4, 1)),
    segments=tuple(dataclasses.replace(s, zero=3, shard_devices=2 * (s.module == "llm"))
                   for s in PLAN.layout.segments),
)  # fmt: skip


@pytest.mark.slow(first=2)
@pytest.mark.parametrize(
    "plan, piece_bytes", [(PLAN, 4096), (PLAN, 32 * 2**20), (IN_PIECES, 32 * 2**20)]
)
def test_segments_hold_their_slices(folder, params, monkeypatch, plan, piece_bytes):
    monkeypatch.setattr(read, "CHUNK_BYTES", piece_bytes)
    source = Folder(folder, MODEL.weights)
    source.check()
    read_bytes, plain = [], source.read

    def counted(name, index):
        array = plain(name, index)
        read_bytes.append(array.nbytes)
        return array

    monkeypatch.setattr(source, "read", counted)
    for s in make_segments(MODEL, plan.layout, jax.devices()).values():
        found = read_segment(source, s)
        want = {part: params[s.plan.module][part] for part in s.read_parts}
        cut = slice(s.plan.start, s.plan.stop)
        want["layers"] = jax.tree.map(lambda a, cut=cut: a[cut], want["layers"])
        cuts = param_zero_specs(s)
        whole = {part: jax.tree.map(whole_of, cuts[part], found[part]) for part in found}
        whole["layers"] = jax.tree.map(partial(in_order, plan, s.plan), whole["layers"])
        jax.tree.map(np.testing.assert_array_equal, whole, want)
        shardings = jax.tree.map(lambda a: a.sharding, owned_param_structs(s))
        assert jax.tree.map(lambda a: a.sharding, found) == shardings
    # Nothing twice, whatever is replicated; nothing for others.
    want_bytes = sum(a.nbytes for a in jax.tree.leaves(params))
    assert plan is IN_PIECES or sum(read_bytes) == want_bytes


def one_device(params, dtype=np.float32):
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, dtype, sharding=sharding), params)


def test_parts_of_a_model_from_folders_of_their_own(tmp_path):
    """A tower and an LLM published apart; the connector stays as it was."""
    maps = {
        "vision": hf.tower_weights(MODEL.modules["vision"]),
        "llm": hf.decoder_weights(MODEL.modules["llm"]),
    }
    published, ours = random_params(MODEL, 1), random_params(MODEL, 2)
    for key, map_ in maps.items():
        write_folder(tmp_path / key, map_, held(published))
        source = Folder(tmp_path / key, map_)
        source.check()
        found = read_params(source, key, one_device(ours[key]), initial=lambda key=key: ours[key])
        want = dict(published[key])
        if key == "vision":
            want["exit"] = ours[key]["exit"]
        jax.tree.map(np.testing.assert_array_equal, found, want)
    tower = Folder(tmp_path / "vision", maps["vision"])
    with pytest.raises(ValueError, match=r"vision\.exit"):
        read_params(tower, "vision", one_device(ours["vision"]))
