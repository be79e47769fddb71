"""Texts that stand for values of fields: sizes with units, short names."""

import pytest

from dflop_jax.config import Config, override
from tests.test_config import get


@pytest.mark.parametrize(
    "text, n_bytes",
    [("80GB", 80e9), ("80GiB", 80 * 2**30), (" 80 GB ", 80e9), ("1.5tib", 1.5 * 2**40),
     ("80g", 80e9), ("512 MiB", 2**29), ("7B", 7.0), ("4e9", 4e9), ("4e9 kB", 4e12), ("0", 0.0)],
)  # fmt: skip
def test_sizes(text, n_bytes):
    for name in ("plan.memory_bytes", "data.sample_memory_bytes"):
        if n_bytes:
            assert get(override(Config(), {name: text}), name) == n_bytes
    assert override(Config(), {"plan.memory_bytes": text}).plan.memory_bytes == n_bytes


@pytest.mark.parametrize("text", ["80 XB", "GB", "1.2.3GB", "80GB80", ""])
def test_sizes_that_are_none(text):
    with pytest.raises(ValueError, match="give a number, or a size such as 80GB"):
        override(Config(), {"plan.memory_bytes": text})


@pytest.mark.parametrize("name", ["model.dtype", "train.moments_dtype"])
@pytest.mark.parametrize("text, dtype", [("bf16", "bfloat16"), ("BF16", "bfloat16"),
                                         ("fp32", "float32")])  # fmt: skip
def test_short_names_of_dtypes(name, text, dtype):
    assert get(override(Config(), {name: text}), name) == dtype
