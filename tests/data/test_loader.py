"""Order, resume, replacement of bad samples, and threads that end."""

import itertools
import json
import logging
import threading
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from dflop_jax.data import EMPTY_SAMPLE, Loader, Sample
from dflop_jax.data.decoder import decode
from dflop_jax.data.loader import OversizeFilter
from dflop_jax.data.shuffle import shuffled_indices
from dflop_jax.records import Load
from tests.data.views import media_spec

SPEC = media_spec(4, 1)


class Numbers:
    """Sample i: `tiles[i]` pieces of "a", as many and `texts[i]` tokens i of "b"; `broken` ones do
    not decode."""

    name, spec = "numbers", SPEC

    def __init__(self, n, broken=(), tiles=None, texts=None, error=ValueError):
        self.tiles, self.texts = tiles or [1] * n, texts or [1] * n
        self.broken, self.error = set(broken), error

    def __len__(self):
        return len(self.tiles)

    def label(self, index):
        return f"number {index}"

    def load(self, index):
        return Load({"a": (3,) * self.tiles[index], "b": (self.texts[index] + self.tiles[index],)})

    def sample(self, index):
        if index in self.broken:
            raise self.error(f"number {index} is broken")
        load = self.load(index)
        fields = {"a": {"x": np.zeros(self.tiles[index])},
                  "b": {"tokens": np.full(load.tokens("b"), index)}}  # fmt: skip
        return Sample(fields, {}, load)


def numbers(samples):
    return [int(s.fields["b"]["tokens"][-1]) for s in samples]


def samples(loader, indices):
    """Decoded samples, in this order."""
    (decoded,) = loader.batches([0], lambda _, by_place: by_place, None, lambda _: indices)
    return [decoded[k] for k in range(len(indices))]


@pytest.mark.parametrize("workers, prefetch", [(1, 1), (3, 2)])
def test_batches_come_in_order_and_resume(workers, prefetch):
    loader = Loader(Numbers(9), global_batch=4, seed=0, workers=workers, prefetch=prefetch)
    batches = loader.batches(itertools.count(2), lambda step, s: (step, numbers(s.values())))
    with closing(batches):
        got = [next(batches) for _ in range(6)]
    assert got == [(s, loader.indices(s)) for s in range(2, 8)]
    assert loader.restore(loader.state(5)) == 5


@pytest.mark.parametrize("then, now", [("a", "b"), ("", "b"), ("a", "")])
def test_other_data_of_as_many_samples_are_refused_unless_allowed(then, now):
    def loader(digest, n=9, name="old.json", seed=0):
        source = Numbers(n)
        source.digest, source.name = digest, name
        return Loader(source, global_batch=4, seed=seed)

    state = loader(then).state(3) | {"bad": [1]}
    assert loader(then, name="moved.json").restore(state) == 3
    with pytest.raises(ValueError, match="start a new run") as error:
        loader(now, name="new.json").restore(state)
    assert f"digest={then}, this run has {now}; restore the data of old.json" in str(error.value)
    assert "accept that of new.json by --data.changed ok" in str(error.value)
    for n in (9, 8):
        allowed = loader(now, n)
        assert allowed.restore(state, "ok") == 3
        assert len(allowed.replaced) == 0  # these are others
    with pytest.raises(ValueError, match=r"seed=0, this run has 1; use the same data and settings"):
        loader(now, seed=1).restore(state, "ok")
    with pytest.raises(ValueError, match="start a new run"):
        Loader(Numbers(9), global_batch=2, seed=0).restore(state)
    older = {name: state[name] for name in ("step", "seed", "n", "global_batch")}
    assert loader(now).restore(older) == 3
    with pytest.raises(ValueError, match="n=9, this run has 8"):
        loader(now, 8).restore(older)


def threads():
    return [t for t in threading.enumerate() if t.name.startswith("dflop-")]


def test_runs_no_further_ahead_than_prefetch_and_ends_its_threads(monkeypatch):
    loader, begun = Loader(Numbers(9), global_batch=2, prefetch=3), []
    indices = loader.indices
    monkeypatch.setattr(loader, "indices", lambda step: begun.append(step) or indices(step))
    batches = loader.batches(itertools.count(), lambda step, _: step)
    assert [next(batches), next(batches)] == [0, 1]
    assert threads()
    batches.close()
    assert begun == [0, 1, 2, 3, 4][: len(begun)]
    assert not threads()


def test_only_selected_places_are_decoded():
    source = Numbers(9)
    loader, decoded = Loader(source, global_batch=4), []
    sample = source.sample
    source.sample = lambda i: decoded.append(i) or sample(i)
    batches = loader.batches(range(2), lambda _, s: numbers(s.values()), lambda step: [step, 3])
    indices = [loader.indices(step) for step in range(2)]
    assert [*batches] == [[indices[k][k], indices[k][3]] for k in range(2)]
    assert len(decoded) == 4


def test_errors_of_prepare_and_unexpected_ones_reach_the_consumer():
    def prepare(step, samples):
        if step == 2:
            raise RuntimeError("packing failed")
        return step

    batches = Loader(Numbers(9), global_batch=2).batches(itertools.count(), prepare)
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(RuntimeError, match="packing failed"):
        next(batches)
    assert not threads()
    failing = Loader(Numbers(1, [0], error=ZeroDivisionError), global_batch=1)
    with pytest.raises(ZeroDivisionError):
        next(failing.batches(itertools.count(), prepare))
    assert not threads()


def test_a_bad_sample_is_counted_named_once_and_replaced_by_the_next_no_larger(caplog):
    # after 0: 1 has more tiles, 2 more tokens, 3 is broken too, 4 serves; for 3: 4 has more tokens
    source = Numbers(6, broken=[0, 3], tiles=[2, 3, 1, 2, 2, 1], texts=[5, 1, 9, 3, 5, 4])
    loader = Loader(source, global_batch=6, max_bad_fraction=0.5)
    with caplog.at_level(logging.WARNING, "dflop_jax.data"):
        for step in range(3):
            wanted = [{0: 4, 3: 5}.get(i, i) for i in loader.indices(step)]
            assert numbers(samples(loader, loader.indices(step))) == wanted
    assert len(loader.replaced) == 2
    named = sorted(r.getMessage().split(": ")[-1] for r in caplog.records)
    assert named == ["number 0 is broken", "number 3 is broken"]
    source = Numbers(3, broken=[0], tiles=[0, 1, 1])  # where nothing else fits
    loader = Loader(source, global_batch=3, max_bad_fraction=0.5)
    assert samples(loader, loader.indices(0))[loader.indices(0).index(0)] is EMPTY_SAMPLE


def test_a_sample_unlike_its_load_counts_as_bad():
    source = Numbers(4)
    sample = source.sample
    source.sample = lambda i: sample(i) if i else Sample({}, {}, Load({"a": (3, 3)}))
    loader = Loader(source, global_batch=4, max_bad_fraction=0.5)
    assert 0 not in numbers(samples(loader, loader.indices(0)))
    assert len(loader.replaced) == 1


def test_what_the_run_has_no_room_for_gives_way_to_the_next_that_it_has(caplog):
    texts = [1, 9, 9, 1, 2, 1]
    source, asked = Numbers(6, texts=texts), []

    def beyond(loads):
        asked.extend(loads)
        return [k for k, load in enumerate(loads) if load.tokens("b") > 5]

    def loader(find_oversize, n=4, **options):
        oversize_filter = OversizeFilter(source, find_oversize, **options)
        return Loader(source, global_batch=n, oversize_filter=oversize_filter)

    plain, roomy = Loader(source, global_batch=4), loader(beyond)
    with caplog.at_level(logging.WARNING, "dflop_jax.data"):
        for step in range(6):
            drawn = plain.indices(step)
            assert roomy.indices(step) == [3 if i in (1, 2) else i for i in drawn]
            tokens = [texts[i] + 1 for i in roomy.indices(step)]
            assert [x.tokens("b") for x in roomy.loads(step)] == tokens
    lines = sorted(r.getMessage() for r in caplog.records)
    assert lines == [
        f"left out: number {k} is larger than every compiled bucket; replaced by number 3"
        for k in (1, 2)
    ]
    n = len(asked)
    roomy.loads(5)
    assert len(asked) == n
    with pytest.raises(ValueError, match=r"number [12] is larger than .*; lower data\.max_tokens"):
        loader(beyond, 6, refuse=True).indices(0)
    with pytest.raises(ValueError, match="and so are all others; make a plan for this data"):
        loader(lambda loads: list(range(len(loads))), 1).indices(0)


def test_bad_samples_are_counted_over_a_resume():
    source = Numbers(200, broken=range(0, 200, 20))
    whole, killed = (Loader(source, global_batch=10) for _ in range(2))

    def run(loader, steps):
        bad = loader.replaced.bad_samples
        return [
            sorted(bad(range(step, step + 1)))
            for step in loader.batches(steps, lambda step, _: step)
        ]

    rows = run(whole, range(20))
    assert run(killed, range(12)) == rows[:12]
    state = json.loads(json.dumps(killed.state(8)))
    resumed = Loader(source, global_batch=10)
    assert resumed.restore(state) == 8
    assert run(resumed, range(8, 20)) == rows[8:]
    assert len(resumed.replaced) == len(whole.replaced) == sum(map(len, rows)) == 10


def test_the_share_of_bad_samples_is_that_of_the_run():
    broken = [*range(0, 200, 20), 10, 30]
    source = Numbers(200, broken)
    loader = Loader(source, global_batch=10, max_bad_fraction=0.05)
    loader.replaced.add_bad(3, broken[:10])
    assert sorted(loader.replaced.bad_samples(range(4))) == sorted(broken[:10])
    assert 0 not in loader.replaced  # it may be there again
    usable = partial(loader.replaced.usable_sample, decode_again=lambda k: decode(source, k))
    usable(19, 0, decode(source, 0))
    with pytest.raises(ValueError, match="11 of 200 samples cannot be decoded, the last is number"):
        usable(19, 10, decode(source, 10))


# ---- the order of samples ----

# "n seed epoch": the first indices of that epoch of grain 0.2.18's
# MapDataset.range(n).seed(seed).shuffle().repeat(), and a check sum of the first 64
GOLDEN = json.loads(Path(__file__).with_name("grain_order.json").read_text())


def check_sum(indices):
    return int((np.asarray(indices, object) * np.arange(1, len(indices) + 1)).sum() % (2**61 - 1))


@pytest.mark.parametrize("case", GOLDEN)
def test_the_order_is_that_of_grain(case):
    n, seed, epoch = map(int, case.split())
    first, total = GOLDEN[case]
    indices = shuffled_indices(np.arange(epoch * n, epoch * n + min(n, 64)), n, seed).tolist()
    assert indices[: len(first)] == first
    assert check_sum(indices) == total


@pytest.mark.parametrize("n", [1, 2, 1000, 65535, 65536, 65537, 262145])
def test_every_index_once_an_epoch(n):
    places = np.arange(2 * n)
    for epoch in np.split(shuffled_indices(places, n, 3), 2):
        assert np.bincount(epoch, minlength=n).tolist() == [1] * n


def test_random_access_and_the_seed():
    whole = shuffled_indices(np.arange(300), 70, 1)
    some = np.array([299, 0, 70, 69, 0])
    assert shuffled_indices(some, 70, 1).tolist() == whole[some].tolist()
    assert shuffled_indices(some[:0], 70, 1).tolist() == []
    epochs = whole[:280].reshape(4, 70)
    assert len({tuple(e) for e in epochs.tolist()}) == 4
    assert shuffled_indices(np.arange(70), 70, 2).tolist() != epochs[0].tolist()
