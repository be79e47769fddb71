"""Mixtures: rules and weights, files that give them, and samples as large as their counts say."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from functools import partial

import numpy as np
import pytest

from dflop_jax.config import DataConfig
from dflop_jax.data import ByteTokenizer
from dflop_jax.data.datasets.index_build import IndexRules, LocalRowReader
from dflop_jax.data.datasets.mixture import (
    MixtureEntry,
    load_mixture,
    repeat_by_weight,
    select_held_out,
    select_subset,
)
from dflop_jax.data.datasets.mixture_source import MixtureSource, open_readers
from dflop_jax.data.media.anyres import AnyRes
from dflop_jax.data.media.mel import MelSpec
from dflop_jax.data.text.tokenize import encode_chatml
from tests.data.media_cases import made_dataset, make_shards, talk
from tests.data.views import prepared

SMALL = AnyRes(tile_px=28, patches=2, pinpoints=((28, 56), (56, 28), (56, 56), (84, 84)))


def pieces(turns, _=None):
    return encode_chatml(turns, ByteTokenizer())


def source(mixture, tmp_path, how=None, **options):
    how = prepared(SMALL, MelSpec(), 3) if how is None else how
    here = partial(LocalRowReader, open_readers(mixture), pieces)
    rules = IndexRules(tmp_path / "index.npz", "bytes", here)
    config = DataConfig("mixture", max_tokens=10**6, seed=options.pop("seed", 0))
    return MixtureSource(mixture, how, pieces, rules, config, **options)


@pytest.mark.parametrize(
    "rule, n, expected",
    [("all", 7, range(7)), ("first:3", 7, range(3)), ("first:30%", 7, range(3)),
     ("first:9", 7, range(7)), ("first:0", 7, []), ("end:2", 7, [5, 6]), ("end:5%", 7, [6]),
     ("end:0%", 7, []), ("first:100%", 7, range(7)), ("all", 0, []), ("random:4", 0, [])],
)  # fmt: skip
def test_subset_rules(rule, n, expected):
    assert select_subset(MixtureEntry("a", subset=rule), n, 0).tolist() == list(expected)


def test_random_subsets_are_drawn_by_the_seed_and_the_part():
    part, other = (MixtureEntry(path, subset="random:10%") for path in "ab")
    rows = select_subset(part, 1000, 3)
    assert len(rows) == 100
    assert (np.diff(rows) > 0).all()
    assert rows.tolist() == select_subset(part, 1000, 3).tolist()
    assert rows.tolist() != select_subset(part, 1000, 4).tolist()
    assert rows.tolist() != select_subset(other, 1000, 3).tolist()


@pytest.mark.parametrize("weight, times", [(1, 1.0), (3, 3.0), (0.25, 0.25), (2.5, 2.5)])
def test_weights_repeat_and_thin_out(weight, times):
    rows = np.arange(10, 50)
    found = repeat_by_weight(MixtureEntry("a", weight=weight), rows, 0)
    assert len(found) == times * 40
    counts = np.bincount(found, minlength=50)[10:]
    assert counts.min() >= int(times)
    assert counts.max() <= np.ceil(times)
    assert len(repeat_by_weight(MixtureEntry("a", weight=weight), rows[:0], 0)) == 0
    with pytest.raises(ValueError, match="a: more than 200,000,000 samples an epoch; lower its"):
        repeat_by_weight(MixtureEntry("a", weight=weight * 1e9), rows, 0)


def test_yaml(tmp_path):
    (tmp_path / "m.yaml").write_text("""
parts:
  - path: a.json
    weight: 2
    subset: first:30%
    root: [photos, /y]
  - /abs/s-{000..003}.tar
""")
    first, second = load_mixture(tmp_path / "m.yaml")
    roots = (f"{tmp_path}/photos", "/y")
    assert first == MixtureEntry(f"{tmp_path}/a.json", 2.0, "first:30%", roots)
    assert second == MixtureEntry("/abs/s-{000..003}.tar")
    (tmp_path / "n.yaml").write_text(
        "datasets:\n  - {json_path: /x/b.json, sampling_strategy: 'end:5%'}\n"
    )
    assert load_mixture(tmp_path / "n.yaml") == (MixtureEntry("/x/b.json", subset="end:5%"),)


@pytest.mark.parametrize(
    "text, why",
    [("parts: [", "not a readable mixture"), ("a: 1", "expected `parts`"), ("", "expected `parts`"),
     ("parts: []", "at least one"), ("parts: [3]", "a part is 3"), ("- {weight: 1}", "path"),
     ("- {path: a, wieght: 1}", "wieght"), ("- {path: a, weight: x}", "weight"),
     ("- {path: a, subset: half}", "not all, first:N"),
     ("- {path: a, subset: 'first:-3'}", "not all"), ("- {path: a, subset: 'first:101%'}", "100%"),
     ("- {path: a, subset: 'first:1.5'}", "whole number"), ("- {path: a, weight: .nan}", "weight"),
     ("- {path: a, weight: 0}", "weight=0.0 is not above 0"), ("- {path: ''}", "no path"),
     ("!!python/object:os.system {}", "readable"),
     ("a: &a [x, x]\nb: &b [*a, *a]\nparts: [*b, *b]", "m.yaml: "), ("[" * 1000, "m.yaml: "),
     ("- " * 200 + "a", "m.yaml: "), ("parts: 2024-99-99", "m.yaml: "), ("\x00", "m.yaml: "),
     ("- {path: a, subset: 'first:" + "9" * 400 + "'}\n- 1", "m.yaml: "),
     ("parts: [{path: [1]}]", "part")],
)  # fmt: skip
def test_a_bad_yaml_is_one_line(tmp_path, text, why):
    (tmp_path / "m.yaml").write_text(text)
    with pytest.raises(ValueError, match=why) as caught:
        load_mixture(tmp_path / "m.yaml")
    assert "m.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_mixture_of_files_and_shards(tmp_path):
    file = made_dataset(tmp_path / "a")
    make_shards(file, tmp_path / "s")
    parts = (MixtureEntry(f"{file}", subset="first:5"), MixtureEntry(f"{tmp_path}/s", 2.0, "end:2"),
             MixtureEntry(f"{file}", subset="end:1"))  # fmt: skip
    found = source(parts, tmp_path)
    names = [found.record(i).name.split("id=")[1] for i in range(len(found))]
    assert names == ["r0", "r1", "r2", "r3", "r4", "r10", "r11", "r10", "r11", "r11"]
    again = source(parts[::-1], tmp_path)
    assert [again.record(i).name.split("id=")[1] for i in (0, 1)] == ["r11", "r10"]
    assert found.label(0).startswith(f"{file}[0]")
    with pytest.raises(ValueError, match="no sample"):
        source((MixtureEntry(f"{file}", subset="first:0"),), tmp_path)


def test_what_is_held_out_is_as_asked_for(tmp_path):
    file = made_dataset(tmp_path / "a", 60)
    parts = (MixtureEntry(f"{file}", 2.0),)

    def ids(split, n, **options):
        found = source(parts, tmp_path, split=split, n_held_out=n, **options)
        return sorted(found.record(i).name.split("id=")[1] for i in range(len(found)))

    everything = ids("train", 0)
    for n in (7, 59, 0.3):
        train, held = ids("train", n), ids("eval", n)
        assert sorted(train + 2 * held) == everything  # the weight repeats what is trained on
        assert len(held) == n if n > 1 else 0 < len(held) < 30
    assert ids("eval", 7) == ids("eval", 7) != ids("eval", 7, seed=1)
    for split, n, why in [
        ("eval", 0, "needs train.eval_samples or train.eval_fraction above 0"),
        ("train", 60, "mixture: 60 held-out samples of 60 records; lower train.eval_samples"),
    ]:
        with pytest.raises(ValueError, match=why):
            source(parts, tmp_path, split=split, n_held_out=n)


def test_a_digest_tells_records_apart_wherever_they_lie(tmp_path):
    file, other = made_dataset(tmp_path, 5), tmp_path / "other.jsonl"
    records = json.loads(file.read_text())
    shutil.copy(tmp_path / "exact.png", tmp_path / "two.png")

    def digest(records, **part):
        other.write_text("\n".join(map(json.dumps, records)))
        return source((MixtureEntry(str(other), **part),), tmp_path).digest

    same = source((MixtureEntry(str(file)),), tmp_path).digest
    assert digest([{**record, "id": 7} for record in records]) == same
    others = [digest(records[::-1]), digest(records, subset="first:4"), digest(records, weight=2)]
    changes = {"conversations": talk("<image>\nWhat?", "Ten.")}, {"image": "two.png"}, {"weight": 2}
    others += [digest([records[0], {**records[1], **change}, *records[2:]]) for change in changes]
    shutil.copy(tmp_path / "thin.png", tmp_path / "exact.png")
    others.append(digest(records))
    assert len({same, *others}) == 8


def test_a_picture_that_changed_since(tmp_path):
    file = made_dataset(tmp_path / "a", 2)
    found = source((MixtureEntry(str(file)),), tmp_path)
    (tmp_path / "a" / "exact.png").write_bytes((tmp_path / "a" / "thin.png").read_bytes())
    with pytest.raises(ValueError, match=r"id=r1: .*exact\.png: .*start the run again"):
        found.sample(1)


# ---- what is held out ----


def lots(rng, sizes):
    return [rng.integers(0, 2**64, size=n, dtype=np.uint64) for n in sizes]


@pytest.mark.parametrize(
    "sizes, n, counts",  # of one record both are trained on
    [([2], 1, [1]), ([10], 9, [9]), ([60, 15, 2], 20, [16, 3, 1]), ([100, 1, 1], 10, [10, 0, 0]),
     ([5000, 5000], 64, [32, 32]), ([50, 50, 2], 2, [1, 1, 0]), ([0, 7], 3, [0, 3])],
)  # fmt: skip
@pytest.mark.parametrize("seed", [0, 1])
def test_each_part_gives_its_share(sizes, n, counts, seed):
    numbers = lots(np.random.default_rng(seed), sizes)
    masks = select_held_out(numbers, n, seed)
    assert [int(m.sum()) for m in masks] == counts
    # Whatever the order: each process and each run draws the same ids.
    again = select_held_out([part[::-1] for part in numbers], n, seed)
    assert all((m == a[::-1]).all() for m, a in zip(masks, again, strict=True))


def test_something_is_left_to_train_on_and_of_a_share_to_hold_out():
    (ids,) = lots(np.random.default_rng(0), [10])
    for n, total in [(1, 1), (2, 2), (5, 4), (100, 10)]:
        why = f"{n} held-out samples of {total} records; lower train"
        with pytest.raises(ValueError, match=why):
            select_held_out([ids[:total]], n, 0)
    for share, which in [(1e-9, "no"), (1 - 1e-12, "every")]:
        why = f"of 5 records holds out {which} record; give another"
        with pytest.raises(ValueError, match=why):
            select_held_out([ids[:3], ids[5:7]], share, 0)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_share_is_drawn_by_each_id_alone(seed):
    """Also of data that grow; of a larger share these and more; of one id in all parts alike."""
    (ids,) = lots(np.random.default_rng(seed), [20_000])
    (tenth,) = select_held_out([ids], 0.1, seed)
    assert abs(int(tenth.sum()) - 2000) < 4 * np.sqrt(20_000 * 0.1 * 0.9)
    order = np.random.default_rng(1).permutation(len(ids))[:12_345]
    parts = select_held_out([ids[order], ids[:77], ids[:0]], 0.1, seed)
    assert [m.tolist() for m in parts] == [tenth[order].tolist(), tenth[:77].tolist(), []]
    (fifth,) = select_held_out([ids], 0.2, seed)
    assert not (tenth & ~fifth).any()
    (other,) = select_held_out([ids], 0.1, seed + 2)
    assert abs(int((tenth & other).sum()) - 200) < 4 * np.sqrt(200)


@pytest.mark.parametrize("seed", range(12))
def test_equal_ids_are_held_out_together_and_all_count(seed):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 2**64, size=40, dtype=np.uint64)
    numbers = [rng.choice(ids, rng.integers(1, 30)) for _ in range(rng.integers(1, 4))]
    n = int(rng.integers(5, 12))
    total = Counter(np.concatenate(numbers).tolist())
    try:
        masks = select_held_out(numbers, n, seed)
    except ValueError:
        assert total.total() < n + len(numbers) * max(total.values())
        return
    held = Counter(x for part, m in zip(numbers, masks, strict=True) for x in part[m].tolist())
    assert all(total[number] == count for number, count in held.items())
    assert n <= held.total() < total.total()
    # Each part gives one id more than it needs at most.
    assert held.total() < n + len(numbers) * max(total.values())
