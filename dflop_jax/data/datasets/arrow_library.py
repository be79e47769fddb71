"""pyarrow, where it is installed."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any


@cache
def arrow(part: str = "") -> Any:
    """Return pyarrow or a part of it. ValueError: it is not installed."""
    try:
        library = importlib.import_module("pyarrow")
        # The system's allocator gives memory back and reserves none, so that limits hold.
        library.set_memory_pool(library.system_memory_pool())
        return importlib.import_module(f"pyarrow.{part}") if part else library
    except ImportError as e:
        raise ValueError(
            f"Parquet and Arrow files need pyarrow: pip install 'dflop_jax[parquet]' ({e})"
        ) from None
