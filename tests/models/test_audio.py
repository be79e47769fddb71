"""What the audio encoder promises beside its numbers (those: tests/verify)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_fields import fields, full_params, outputs

from dflop_jax.data.media.mel import encoder_tokens
from dflop_jax.train.optimizer import UNDECAYED
from models.audio import AudioModule
from models.sizes import AUDIO

MODULE = AudioModule(AUDIO["whisper-nano"], 24, jnp.dtype("float32"))


@pytest.mark.parametrize("items", [0, 1, 3])
def test_padding_is_not_heard(items):
    """Frames beyond the real ones change nothing in the tokens that are used; nothing is NaN."""
    params = full_params(MODULE)
    batch = fields(MODULE, items, 0)
    frames = np.asarray([0, 13, 32])[:items]
    batch["mel_frames"] = jnp.asarray(frames, jnp.int32)
    # The stem's two convolutions look two frames further.
    real = np.arange(MODULE.size.frames) < frames[:, None, None] + 2
    other = {**batch, "mel": jnp.where(real, batch["mel"], 100.0)}
    run = jax.jit(lambda b: outputs(MODULE, params, b))
    a, b = np.asarray(run(batch)), np.asarray(run(other))
    assert a.shape == (items, 8, 24)
    assert np.isfinite(a).all()
    for item in range(items):
        used = encoder_tokens(frames[item])
        np.testing.assert_array_equal(a[item, :used], b[item, :used])
    if items == 3:
        assert not np.array_equal(a[1], b[1])


def test_positions_are_not_trained():
    params = full_params(MODULE)
    batch = fields(MODULE, 2, 0)
    grads = jax.jit(jax.grad(lambda p: jnp.sum(outputs(MODULE, p, batch) ** 2)))(params)
    assert not np.any(grads["entry"]["bias"])
    assert np.any(grads["entry"]["conv1"]["kernel"])
    # Nor does weight decay shrink them.
    assert "bias" in UNDECAYED
