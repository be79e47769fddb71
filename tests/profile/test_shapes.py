"""The shapes that are timed, by hand and by what they must cover."""

from types import SimpleNamespace

import numpy as np
import pytest

from dflop_jax.profile.shapes import shapes_to_time, shapes_within
from dflop_jax.records import DataProfile, Load, Shape


def shapes_of(*loads, piece_tokens=None, multiple=32):
    model = SimpleNamespace(modules={"m": None}, piece_tokens=piece_tokens or {})
    data = DataProfile("d", len(loads), tuple(Load({"m": n}) for n in loads))
    return shapes_to_time(data, model, multiple)["m"]


def test_a_module_of_one_piece_a_row_by_hand():
    """From an eighth of the largest sample's pieces to four times as many."""
    got = shapes_of((16,) * 40, (16,), (), piece_tokens={"m": 16})
    assert got == [Shape(n, 16) for n in (5, 20, 40, 160)]
    assert shapes_of((16,), piece_tokens={"m": 16}) == [Shape(n, 16) for n in (1, 2, 3, 4)]


def test_a_packed_module_by_hand():
    """Rows of a quarter, of all and of twice the longest piece, and several rows at once."""
    got = shapes_of((300,), (100,))
    assert got[:3] == [Shape(1, 96), Shape(1, 320), Shape(1, 640)]
    assert got[3:] == [Shape(4, 96), Shape(4, 320)]


@pytest.mark.parametrize("piece_tokens, tokens", [({}, 32), ({"m": 16}, 16)])
def test_a_module_that_the_data_lack_gets_small_shapes(piece_tokens, tokens):
    got = shapes_of((), (), piece_tokens=piece_tokens)
    assert got == [Shape(1, tokens), Shape(2, tokens)]


@pytest.mark.parametrize("multiple", [1, 32, 128])
def test_every_piece_fits_and_sizes_spread(multiple):
    rng = np.random.default_rng(multiple)
    for _ in range(50):
        loads = [
            tuple(rng.integers(1, 2000, int(rng.integers(0, 6))).tolist())
            for _ in range(int(rng.integers(1, 8)))
        ]
        got = shapes_of(*loads, multiple=multiple)
        assert all(s.tokens % multiple == 0 for s in got)
        assert max(s.tokens for s in got) >= max((n for load in loads for n in load), default=0)
        assert max(s.size for s in got) >= max(sum(load) for load in loads)
        assert got[-1].size >= max(s.size for s in got) / 2
        assert len(set(got)) > 1


def test_shapes_beyond_memory_are_left_out_and_a_sample_beyond_it_is_refused():
    """A square of attention of 4 bytes an element, as programs that mask have."""
    shapes = {"vision": shapes_of((300,), (100,))}

    def bytes_of(module, shape):
        return 4.0 * shape.rows * shape.tokens**2

    row = bytes_of("vision", Shape(1, 320))
    assert shapes_within(shapes, 16 * row, bytes_of) == shapes  # 640 tokens are four such rows
    got = shapes_within(shapes, 15.9 * row, bytes_of)
    assert got == {"vision": [Shape(1, 96), Shape(1, 320), Shape(4, 96)]}
    assert shapes_within(shapes, 1.71 * row, bytes_of)["vision"][1] == Shape(1, 320)
    with pytest.raises(ValueError, match=r"320 tokens of 'vision' in a row.* --data\.max_pixels$"):
        shapes_within(shapes, 1.69 * row, bytes_of)
    with pytest.raises(ValueError, match=r"'llm' in a row.*lower --data\.max_tokens or --data\.m"):
        shapes_within({"llm": shapes["vision"]}, 1.0, bytes_of)
