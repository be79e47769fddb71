"""The state of a run, saved under one plan and restored under another, bit for bit; saved while
training goes on; and what happens when it cannot be written or is of another run."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from dflop_jax.checkpoint.checkpointer import specs_of, state_arrays
from dflop_jax.checkpoint.store import CorruptCheckpoint

from .checkpoint_cases import (  # noqa: F401
    PLANS,
    assert_same,
    executor,
    fill,
    joined,
    model,
    reader_of,
    runs,
    save,
    saver_of,
)

# ---- what is saved ----


def expected_shapes(m) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the parameters, from the model alone."""
    found = {}
    for name, module in m.modules.items():
        for part in ("entry", "layers", "exit"):
            tree = jax.eval_shape(functools.partial(module.init, part), jax.random.key(0))
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
                keys = "/".join(k.key for k in path)
                lead = (module.n_layers,) if part == "layers" else ()
                found[f"params/{name}/{part}/{keys}"] = (*lead, *leaf.shape)
    return found


@pytest.mark.parametrize("name", PLANS)
def test_names_and_shapes_do_not_depend_on_the_plan(runs, name):
    specs = specs_of(runs(name).arrays)
    want = expected_shapes(model())
    params = {n: s.shape for n, s in specs.items() if n.startswith("params/")}
    assert params == want
    moments = {n: s.shape for n, s in specs.items() if "/mu/" in n or "/nu/" in n}
    assert sorted(moments.values()) == sorted([*want.values()] * 2)
    assert {n: (s.shape, s.dtype) for n, s in specs.items()} == {
        n: (s.shape, s.dtype) for n, s in specs_of(runs("one device each").arrays).items()
    }


@pytest.mark.parametrize("name", PLANS)
def test_one_segment_saves_what_several_hold(runs, name):
    counters = [a for a in runs(name).arrays if a.name.endswith("/count")]
    # Adam's and the schedule's, for each module.
    assert sum(a.saves for a in counters) == len({a.name for a in counters}) == 4
    assert len(counters) == 2 * len(runs(name).ex.plan.layout.segments)


# ---- saved under one plan, restored under another ----


@pytest.mark.slow(first=3)
@pytest.mark.parametrize("source", PLANS)
def test_any_plan_reads_what_another_saved(runs, source):
    seed = list(PLANS).index(source)
    ex, saver = runs(source).ex, runs(source).saver
    fill(ex, seed)
    want = joined(ex)
    save(saver, 7, {"note": [1, "two"]})
    assert saver.error_text == ""
    reader = reader_of(saver, 7)
    assert (reader.step, reader.run_state) == (7, {"note": [1, "two"]})
    for target in PLANS:
        other = runs(target).ex
        fill(other, 50 + seed)
        before = jax.tree.map(lambda a: a.sharding, (other.state.params, other.state.opt_state))
        runs(target).saver.restore(reader)
        assert_same(joined(other), want)
        after = jax.tree.map(lambda a: a.sharding, (other.state.params, other.state.opt_state))
        assert after == before


def test_replicas_are_restored_on_every_device(runs):
    saver = runs("stage 2 in 2 rounds").saver
    fill(runs("stage 2 in 2 rounds").ex, 1)
    save(saver, 0)
    other = runs("all on the same 8").ex
    fill(other, 2)
    runs("all on the same 8").saver.restore(reader_of(saver, 0))
    for leaf in jax.tree.leaves((other.state.params, other.state.opt_state)):
        host = np.asarray(leaf)
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(shard.data, host[shard.index])


# ---- not for this run ----


def one_line(error) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


def test_frozen_parts_have_no_optimizer_state(runs, tmp_path):
    frozen = executor("4 LLM segments", freeze=("vision",))
    try:
        names = specs_of(state_arrays(frozen))
        assert {n for n in names if n.startswith("params/")} == set(expected_shapes(model()))
        moments = [n.split("/") for n in names if n.startswith("opt_state/vision/0/mu/")]
        assert {keys[4] for keys in moments} == {"exit"}  # the connector
        fill(frozen, 3)
        want = joined(frozen)
        saver = saver_of(frozen, tmp_path)
        save(saver, 2)
        fill(frozen, 4)
        saver.restore(reader_of(saver, 2))
        assert_same(joined(frozen), want)
        with pytest.raises(ValueError, match="choice of frozen parts") as error:
            runs("tp 2").saver.restore(reader_of(saver, 2))
        assert "opt_state/vision" in one_line(error)
    finally:
        frozen.close()


def test_another_model_is_refused_by_name(runs, tmp_path):
    saver = saver_of(runs("one device each").ex, tmp_path)
    save(saver, 2)
    deeper = executor("one device each", n_layers=6)
    try:
        with pytest.raises(ValueError, match="another model") as error:
            saver_of(deeper, tmp_path).restore(reader_of(saver, 2))
    finally:
        deeper.close()
    assert "checkpoint of step 2 has params/llm/layers/" in one_line(error)
    assert "float32[4, " in one_line(error)
    assert "float32[6, " in one_line(error)


def test_damage_is_named(runs, tmp_path):
    saver = saver_of(runs("one device each").ex, tmp_path)
    save(saver, 2)
    file = tmp_path / "00000002/process-00000"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptCheckpoint, match="process-00000") as error:
        saver.restore(reader_of(saver, 2))
    one_line(error)
