"""A run that begins with the parameters of another run, or with published weights."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest

from dflop_jax.checkpoint.store import CheckpointStore
from dflop_jax.records import Shape
from dflop_jax.runtime.executor import Executor
from dflop_jax.runtime.layout import make_segments
from dflop_jax.runtime.parameter_layout import initial_structs, param_zero_specs
from dflop_jax.runtime.state_arrays import parameter_arrays
from dflop_jax.train.load_params import make_initializer, read_segment_params
from dflop_jax.train.loop import TrainLoop
from dflop_jax.train.trainer import Trainer
from dflop_jax.weights import write_folder
from models import hf, llava, omni
from tests.plans import graph_plan
from tests.runtime import plain
from tests.weights.conftest import held, random_params

from ..plans import nano_profile
from ..runtime.plain import whole_of
from ..weights.conftest import MODEL
from ..weights.conftest import PLAN as SEGMENT_PLAN
from .resume_cases import CACHE, CONFIG, PLAN, STEPS

pytestmark = pytest.mark.usefixtures("_in_a_folder_of_its_own")


class Begun(Exception):
    pass


def begun_with(weights: str, monkeypatch) -> dict[str, np.ndarray]:
    """The parameters that a run has before its first step, by name."""

    def stop(loop, *args):
        state, found = loop.ex.state, {}
        for name, segment in loop.ex.programs.segments.items():
            leaves = jax.tree.leaves({**state.params[name], **state.masters[name]})
            for a in parameter_arrays(name, segment):
                found[a.name] = np.asarray(leaves[a.leaf])
        raise Begun(found)

    monkeypatch.setattr(TrainLoop, "run", stop)
    model = dataclasses.replace(CONFIG.model, weights=(weights,))
    config = dataclasses.replace(CONFIG, model=model, run_dir="run", **CACHE)
    with pytest.raises(Begun) as begun:
        Trainer(config, plan=PLAN, profile=nano_profile(), existing="overwrite").fit()
    return begun.value.args[0]


@pytest.mark.parametrize("at, step", [("", STEPS), ("@6", 6)])
def test_it_begins_where_the_other_one_came_to(whole, monkeypatch, at, step):
    found = begun_with(f"{whole}{at}", monkeypatch)
    saved = CheckpointStore(whole / "checkpoints").open(step)
    names = {n for n in saved.specs if n.startswith("params/")}
    assert found.keys() == names
    for name, array in found.items():
        np.testing.assert_array_equal(array, saved.read(name, [0] * array.ndim, array.shape))


def test_a_single_module_may_begin_so(whole, monkeypatch):
    found = begun_with(f"llm={whole}", monkeypatch)
    saved = CheckpointStore(whole / "checkpoints").open(STEPS)
    same = {
        name: np.array_equal(array, saved.read(name, [0] * array.ndim, array.shape))
        for name, array in found.items()
    }
    assert all(is_same for name, is_same in same.items() if name.startswith("params/llm/"))
    assert not all(is_same for name, is_same in same.items() if name.startswith("params/vision/"))


def test_what_cannot_be_begun_with_is_said(whole, tmp_path):
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    for path, says in (
        (f"{whole}@7", r"no checkpoint of step 7; existing steps: 12, 9, 6, 3"),
        (f"{whole}@last", "'last' is not a step"),
        (f"{tmp_path}/empty", "no checkpoint in it"),
    ):
        with pytest.raises(ValueError, match=says):
            make_initializer(None, (path,))


ANYRES = llava.build("anyres-nano")
PLANS = [((0, 1, 1, 1), (1, 1, 1, 1), 1), ((0, 1, 2, 1), (2, 2, 1, 2), 2)]


def begun(model, plan, begin):
    """By module, the parameters that a run begins with."""
    ex = Executor(model, plan, optax.sgd(1.0))
    ex.init(3, begin)
    found = plain.join(plan, ex.state.params)
    ex.close()
    return found


def assert_same(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """(folder, parameters) of a published model."""
    params = random_params(ANYRES, 1)
    folder = tmp_path_factory.mktemp("hf") / "hf"
    write_folder(folder, ANYRES.weights, held(params))
    return folder, params


@pytest.mark.parametrize("vision, llm, group_size", PLANS)
def test_a_whole_model(published, vision, llm, group_size):
    folder, params = published
    plan = plain.plan_of(ANYRES, vision, llm, group_size=group_size)
    assert_same(begun(ANYRES, plan, make_initializer(ANYRES, (str(folder),))), params)


def test_parts_with_a_fresh_connector(tmp_path):
    """A tower and a decoder that were published apart, in a model that has sound too."""
    model = omni.build("omni-nano")
    params = random_params(model, 2)
    for module, map_ in (
        ("vision", hf.tower_weights(model.modules["vision"])),
        ("llm", hf.decoder_weights(model.modules["llm"])),
    ):
        write_folder(tmp_path / module, map_, held({module: params[module]}))
    shapes = {**{m: Shape(8, n) for m, n in model.piece_tokens.items()}, "llm": Shape(2, 96)}
    meshes = {"vision": (0,), "audio": (1,), "llm": (2, (1, 2, 1))}
    parts = {m: [(x.n_layers, *meshes[m])] for m, x in model.modules.items()}
    plan = graph_plan(model, parts, shapes)
    names = tuple(f"{m}={tmp_path / m}" for m in ("vision", "llm"))
    found, fresh = begun(model, plan, make_initializer(model, names)), begun(model, plan, None)
    assert_same(found["llm"], params["llm"])
    assert_same(found["audio"], fresh["audio"])
    for part in ("entry", "layers"):
        assert_same(found["vision"][part], params["vision"][part])
    read = {"norm"} & found["vision"]["exit"].keys()  # the tower's norm stands with the connector
    for name in found["vision"]["exit"].keys() - read - {"post_norm"}:
        assert_same(found["vision"]["exit"][name], fresh["vision"]["exit"][name])


@pytest.mark.parametrize(
    "weights, message",
    [
        (("/no/such/folder",), "no such"),
        (("audio=.",), "no published weights of 'audio'; known: vision, llm"),
        ((".", "llm=."), "one folder of the whole model, or MODULE=FOLDER"),
    ],
)
def test_wrong_weights_are_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        make_initializer(ANYRES, weights)


# The tower's matrices flat over 3 data ranks and 2 tensor ranks, the LLM's in two segments.
SPLIT = SEGMENT_PLAN.with_layout(
    submeshes=(dataclasses.replace(SEGMENT_PLAN.layout.submeshes[0], stage=1, data=3),
               *SEGMENT_PLAN.layout.submeshes[1:]),
    segments=tuple(dataclasses.replace(s, zero=3) for s in SEGMENT_PLAN.layout.segments),
)  # fmt: skip


class Saved:
    """A checkpoint of parameters by module."""

    step = 1

    def __init__(self, params):
        leaves = jax.tree_util.tree_leaves_with_path(params)
        names = (jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves)
        self.arrays = {f"params/{n}": a for n, (_, a) in zip(names, leaves, strict=True)}
        self.specs = {
            n: SimpleNamespace(shape=a.shape, numpy_dtype=a.dtype) for n, a in self.arrays.items()
        }

    def read(self, name, start, shape):
        box = tuple(slice(lo, lo + n) for lo, n in zip(start, shape, strict=True))
        return self.arrays[name][box]


def test_parameters_are_the_other_run_s_however_they_are_split():
    saved = Saved(random_params(MODEL, 3))
    for name, s in make_segments(MODEL, SPLIT.layout, jax.devices()).items():
        found = read_segment_params(saved, s, lambda: pytest.fail("nothing is fresh"))
        cuts = param_zero_specs(s)
        whole = {p: jax.tree.map(whole_of, cuts[p], found[p]) for p in found}
        for a, leaf in zip(parameter_arrays(name, s), jax.tree.leaves(whole), strict=True):
            rows = list(a.rows) if a.n_rows is not None else ...
            np.testing.assert_array_equal(leaf, saved.arrays[a.name][rows], err_msg=a.name)


def test_adapters_that_the_other_run_had_not_are_drawn():
    params = random_params(MODEL, 3)
    adapted = MODEL.with_lora(2, 8.0, targets=("llm",))
    for name, s in make_segments(adapted, SEGMENT_PLAN.layout, jax.devices()).items():
        structs = initial_structs(s)
        drawn = jax.tree.map(lambda a: np.full(a.shape, 7, a.dtype), structs)
        found = read_segment_params(Saved(params), s, lambda drawn=drawn: drawn)
        arrays = parameter_arrays(name, s)
        kept = Saved(params).arrays
        for a, leaf in zip(arrays, jax.tree.leaves(found), strict=True):
            is_adapter = "/adapter/" in a.name
            assert is_adapter == (a.name not in kept)
            assert np.all(np.asarray(leaf) == 7) == is_adapter, a.name
        assert any("/adapter/" in a.name for a in arrays) == (s.plan.module == "llm")
