"""What a record asks of its values."""

from __future__ import annotations


def require(condition: bool, message: str) -> None:
    """ValueError with the message unless it is so."""
    if not condition:
        raise ValueError(message)
