"""Random parameters for folders, and when a verified folder is the reference's."""

import jax
import numpy as np


def check_equal(result):
    """Every tensor has the same bits; logits and gradients are the reference's, to 1e-5 and 1e-4 of
    the largest or as far as its own float32 is (`dflop_jax.verify.verify.Verified`)."""
    assert result.not_compared == ""
    assert result.bit_identical
    assert result.exit_code == 0
    assert result.max_logit_error < 1e-4
    assert result.max_grad_error < 1e-3


def random_params(model, seed):
    """Every parameter random, of a size that keeps activations near 1."""
    rng = np.random.default_rng(seed)

    def draw(path, spec):
        fan_in = np.prod(spec.shape[:-1]) if len(spec.shape) > 1 else 25
        noise = rng.normal(size=spec.shape) / np.sqrt(fan_in)
        return (noise + (path[-1].key == "scale")).astype(np.float32)

    def part(module, name):
        one = jax.eval_shape(lambda key: module.init(name, key), jax.random.key(0))
        if name != "layers":
            return jax.tree_util.tree_map_with_path(draw, one)
        layers = [jax.tree_util.tree_map_with_path(draw, one) for _ in range(module.n_layers)]
        return jax.tree.map(lambda *a: np.stack(a), *layers)

    return {
        name: {p: part(module, p) for p in module.inputs} for name, module in model.modules.items()
    }
