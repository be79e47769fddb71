"""A run that begins with the parameters of another one."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from dflop_jax.checkpoint.state_arrays import parameter_arrays
from dflop_jax.train.load_params import make_initializer, open_checkpoint
from dflop_jax.train.loop import TrainLoop
from dflop_jax.train.trainer import Trainer

from ..plans import nano_profile
from .resume_cases import (  # noqa: F401
    CACHE,
    CONFIG,
    PLAN,
    STEPS,
    _in_a_folder_of_its_own,
    quick,
    whole,
)


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
    saved = open_checkpoint(whole / "checkpoints", step)
    names = {n for n in saved.specs if n.startswith("params/")}
    assert found.keys() == names
    for name, array in found.items():
        np.testing.assert_array_equal(array, saved.read(name, [0] * array.ndim, array.shape))


def test_a_single_module_may_begin_so(whole, monkeypatch):
    found = begun_with(f"llm={whole}", monkeypatch)
    saved = open_checkpoint(whole / "checkpoints", STEPS)
    same = {
        name: np.array_equal(array, saved.read(name, [0] * array.ndim, array.shape))
        for name, array in found.items()
    }
    assert all(is_same for name, is_same in same.items() if name.startswith("params/llm/"))
    assert not all(is_same for name, is_same in same.items() if name.startswith("params/vision/"))


def test_what_cannot_be_begun_with_is_said(whole, tmp_path):
    for path, says in (
        (f"{whole}@7", r"no checkpoint of step 7; those that are there: 12, 9, 6, 3"),
        (f"{whole}@last", "'last' is no step"),
    ):
        with pytest.raises(ValueError, match=says):
            make_initializer(None, (path,))
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ValueError, match="no checkpoint; those that are there: none"):
        open_checkpoint(tmp_path / "empty" / "checkpoints", None)


def test_another_model_is_refused(whole):
    config = dataclasses.replace(
        CONFIG, model=dataclasses.replace(CONFIG.model, factory="models.llava:build", size="nano")
    )
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, weights=(str(whole),)),
        run_dir="run",
        **CACHE,
    )
    with pytest.raises(ValueError, match="of another model"):
        Trainer(config, plan=PLAN, profile=nano_profile()).fit()
