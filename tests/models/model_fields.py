"""Parameters and fields that the model tests share."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

PARTS = ("entry", "layers", "exit")


@partial(jax.jit, static_argnums=0)
def initial_params(module, key):
    """{"entry", "layers" (stacked), "exit"} as the module initialises them; in one program, since
    step by step they are a hundred."""
    keys = jax.random.split(key, module.n_layers + 2)
    return {
        "entry": module.init("entry", keys[0]),
        "layers": jax.vmap(lambda k: module.init("layers", k))(keys[1:-1]),
        "exit": module.init("exit", keys[-1]),
    }


def full_params(module, seed=0):
    """Parameters of `initial_params`' shapes, random in every array: no scale is 1, no bias 0."""
    rng = np.random.default_rng(seed)

    def draw(path, spec):
        noise = 0.2 * rng.normal(size=spec.shape)
        return jnp.asarray(noise + (path[-1].key == "scale"), jnp.float32)

    shapes = jax.eval_shape(lambda key: initial_params(module, key), jax.random.key(0))
    return jax.tree_util.tree_map_with_path(draw, shapes)


def forward(module, params, batch):
    """Hidden states after every layer."""
    x = module.entry(params["entry"], batch)
    return jax.lax.scan(lambda x, p: (module.layer(p, x, batch), None), x, params["layers"])[0]


def outputs(module, params, batch):
    """What the module's exit gives."""
    x = forward(module, params, batch)
    return module.exit(params["exit"], x, batch, params["entry"] if module.tied else None)


def packed_segments(items, tokens, rng):
    """Segment ids and positions of rows packed with samples of random lengths, padded with 0."""
    segments = np.zeros((items, tokens), np.int32)
    positions = np.zeros((items, tokens), np.int32)
    for row in range(items):
        start, segment = 0, 1
        while start < tokens - 1:
            length = int(rng.integers(1, max(2, tokens // 2)))
            stop = min(start + length, tokens - 1)  # the last token pads
            segments[row, start:stop] = segment
            positions[row, start:stop] = np.arange(stop - start)
            start, segment = stop, segment + 1
    return segments, positions


def fields(module, items, tokens, seed=0):
    """Random fields of every kind that `module` reads."""
    rng = np.random.default_rng(seed)
    names = {name for part in PARTS for name in module.inputs[part]}
    if "pixels" in names:
        spec = module.field_spec("pixels", items, tokens)
        return {"pixels": jnp.asarray(rng.integers(0, 256, spec.shape, np.uint8))}
    if "mel" in names:
        spec = module.field_spec("mel", items, tokens)
        frames = rng.integers(0, spec.shape[-1] + 1, items)
        return {
            "mel": jnp.asarray(rng.normal(size=spec.shape), jnp.float32),
            "mel_frames": jnp.asarray(frames, jnp.int32),
        }
    segments, positions = packed_segments(items, tokens, rng)
    shape = (items, tokens)
    vocab = module.size.vocab
    out = {
        "tokens": rng.integers(0, vocab, shape, np.int32),
        "targets": rng.integers(0, vocab, shape, np.int32),
        "weights": (rng.random(shape) < 0.6).astype(np.float32) * (segments > 0),
        "is_visual": rng.random(shape) < 0.3,
        "visual": rng.normal(size=(*shape, module.size.width)),
        "segment_ids": segments,
        "positions": positions,
        "is_newline": rng.random(shape) < 0.1,
    }
    return {n: jnp.asarray(out[n], module.field_spec(n, items, tokens).dtype) for n in names}
