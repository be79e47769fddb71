"""When a verified folder is the reference's."""


def check_equal(result):
    """Every tensor has the same bits; logits and gradients are the reference's, to 1e-5 and 1e-4 of
    the largest or as far as its own float32 is (`dflop_jax.verify.results`)."""
    assert result.not_compared == ""
    assert result.bit_identical
    assert result.exit_code == 0
    assert result.max_logit_error < 1e-4
    assert result.max_grad_error < 1e-3
