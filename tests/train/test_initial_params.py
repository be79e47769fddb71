"""A run begins with published weights, whole or of parts, on any plan; wrong ones are refused."""

import jax
import numpy as np
import optax
import pytest

from dflop_jax.records import Shape
from dflop_jax.runtime.executor import Executor
from dflop_jax.train.load_params import make_initializer
from dflop_jax.weights import write_folder
from models import hf, llava, omni
from tests.plans import graph_plan
from tests.runtime import plain
from tests.weights.conftest import held, random_params

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
def whole(tmp_path_factory):
    """(folder, parameters) of a published model."""
    params = random_params(ANYRES, 1)
    folder = tmp_path_factory.mktemp("whole") / "hf"
    write_folder(folder, ANYRES.weights, held(params))
    return folder, params


@pytest.mark.parametrize("vision, llm, group_size", PLANS)
def test_a_whole_model(whole, vision, llm, group_size):
    folder, params = whole
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


def test_nothing_published_is_nothing_to_read():
    assert make_initializer(ANYRES, ()) is None


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


def test_a_model_without_a_published_form():
    with pytest.raises(ValueError, match="no published form; give MODULE=FOLDER"):
        make_initializer(omni.build("omni-nano"), (".",))


def test_weights_of_another_model(whole):
    folder, _ = whole
    with pytest.raises(ValueError, match="choose the size that this folder holds"):
        make_initializer(llava.build("llava-ov-0.5b"), (str(folder),))
