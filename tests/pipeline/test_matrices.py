"""What is taken for a matrix, against how Hugging Face's checkpoints have the parameters."""

import functools

import jax
import pytest

from dflop_jax.pipeline.matrices import groups, is_matrix, published_shape
from models import internvl, llava, qwen3_vl

MODELS = {"anyres-nano": llava, "internvl-nano": internvl, "qwen3-vl-nano": qwen3_vl}


@pytest.mark.parametrize("name", MODELS)
def test_layers_and_connectors_have_the_matrices_of_the_checkpoint(name):
    model = MODELS[name].build(name)
    checked = {True: 0, False: 0}

    @functools.cache
    def part_of(module, part):
        """Shapes and axes of a part's parameters; tensors are many, parts are few."""
        module = model.modules[module]
        shapes = jax.eval_shape(lambda: module.init(part, jax.random.key(0)))
        return shapes, module.logical_axes(part)

    for tensor in model.weights.tensors:
        leaf, axes = part_of(tensor.module, tensor.part)
        for key in tensor.path:
            leaf, axes = leaf[key], axes[key]
        in_file = tuple(n for n in tensor.layout.file_shape if n > 1)
        takes = is_matrix(tensor.part, tensor.path[-1], axes)
        if tensor.part != "entry" and "vocab" not in axes:
            assert takes == (len(in_file) == 2), tensor.name
            shape = published_shape(leaf.shape, tensor.path[-1], axes)
            assert shape in (in_file, in_file[::-1]), tensor.name
        else:
            assert not takes, tensor.name
        checked[takes] += 1
    assert min(checked.values()) > 5


def test_groups_by_hand():
    assert groups(()) == []
    assert groups(("heads", None)) == [0]
    assert groups(("embed", "kv_heads", None)) == [0, 1]
    assert groups(("heads", None, None)) == [0, 2]  # an adapter's, of rank the last
    assert groups((None, "heads", None)) == [0, 1]  # an adapter's, of rank the first
    assert groups(("embed", None, "heads", None)) == [0, 1]
    assert groups((None, "embed")) == [0, 1]
    assert published_shape((4, 8, 32), "kernel", ("heads", None, "embed")) == (32, 32)
    assert not is_matrix("layers", "modulation", (None, "embed"))
