"""The whole model learns from pictures at the default learning rate."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_fields import initial_params, outputs

from models.llava import build

N_COLOURS, N_ROWS = 4, 16


def _coloured_squares(model, rng):
    """Rows of one tile and one supervised token, which names the tile's colour."""
    colour = rng.integers(0, N_COLOURS, N_ROWS)
    px, n_visual = model.size.vision.tile_px, model.size.vision.tokens_per_tile
    pixels = rng.integers(100, 156, (N_ROWS, px, px, 3)).astype(np.uint8)
    pixels[:, : px // 2] = 255 * (colour[:, None] >> np.arange(3) & 1)[:, None, None]
    shape = (N_ROWS, n_visual + 1)
    last = np.arange(shape[1]) == n_visual
    return {
        "pixels": pixels,
        "tokens": np.ones(shape, np.int32),
        "targets": np.broadcast_to(10 + colour[:, None], shape).astype(np.int32),
        "weights": np.broadcast_to(last, shape).astype(np.float32),
        "is_visual": np.broadcast_to(~last, shape),
        "segment_ids": np.ones(shape, np.int32),
        "positions": np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape),
    }


@pytest.mark.slow
def test_nano_learns_colours_from_pixels():
    model = build("nano")
    modules, rng = model.modules, np.random.default_rng(0)
    keys = dict(zip(modules, jax.random.split(jax.random.key(0, impl="rbg"))))
    params = {name: initial_params(m, keys[name]) for name, m in modules.items()}
    moments = jax.tree.map(lambda p: (np.zeros(p.shape, p.dtype),) * 2, params)

    def loss(params, batch):
        features = outputs(modules["vision"], params["vision"], batch)
        visual = jnp.pad(features, ((0, 0), (0, 1), (0, 0)))
        out = outputs(modules["llm"], params["llm"], {**batch, "visual": visual})
        n = batch["weights"].sum()
        return out["loss_sum"] / n, out["correct"] / n

    def adam(p, g, moments, correction):
        m, v = 0.9 * moments[0] + 0.1 * g, 0.99 * moments[1] + 0.01 * g * g
        update = m / correction[0] / (jnp.sqrt(v / correction[1]) + 1e-8)
        return p - 1e-3 * update, (m, v)

    @jax.jit
    def step(params, moments, correction, batch):
        (_, accuracy), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
        both = jax.tree.map(lambda p, g, mv: adam(p, g, mv, correction), params, grads, moments)
        params, moments = (jax.tree.map(lambda _, new, i=i: new[i], params, both) for i in (0, 1))
        return params, moments, accuracy

    accuracies = []
    for n in range(1, 101):
        correction = np.array([1 - 0.9**n, 1 - 0.99**n], np.float32)
        batch = _coloured_squares(model, rng)
        params, moments, accuracy = step(params, moments, correction, batch)
        accuracies.append(float(accuracy))
    assert np.mean(accuracies[:3]) < 0.5
    assert np.mean(accuracies[-10:]) > 0.95
    blind = _coloured_squares(model, rng)
    blind["pixels"] = np.full_like(blind["pixels"], 128)
    assert step(params, moments, correction, blind)[2] < 0.6
