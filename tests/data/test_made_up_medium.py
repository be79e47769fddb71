"""A modality that the product has never heard of, by one file and its name in a model: indexed,
decoded in processes of their own, cut and asked about; tests/graphs trains on it."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import numpy as np
import pytest

from dflop_jax import Config, DataConfig, ModelConfig, TrainConfig
from dflop_jax.data import ByteTokenizer, MediaSpec, make_loader, make_source
from dflop_jax.generate.prompt import prompt_sample
from dflop_jax.train.run_context import build_model
from tests.data.media_cases import noise, talk
from tests.graphs.made_up import GRAINS, Toy

SIZES = (1, 5, 6, 7, 20, 40)  # grains; the first is too faint


@dataclass(frozen=True)
class Sniffer:
    """A nose and a module that reads text."""

    vocab_size = 260
    piece_tokens = {"nose": GRAINS}
    preprocessing = {"nose": {"form": "tests.data.media.smells:FORM"}}
    modules = {"nose": Toy("smells", 2), "llm": Toy("words", 2, tied=True)}
    edges = ({"source": "nose", "target": "llm", "name": "seen"},)


def build(size="", dtype="float32"):
    return Sniffer()


@pytest.fixture
def config(tmp_path):
    rng = np.random.default_rng(0)
    for n in SIZES:
        (tmp_path / f"{n}.smell").write_bytes(rng.integers(1, 256, n, np.uint8).tobytes())
    (tmp_path / "a.ppm").write_bytes(b"P6 8 8 255 " + noise(8, 8).tobytes())
    records = [
        *({"smell": f"{n}.smell", "conversations": talk("Sniff <smell>!", "It")} for n in SIZES),
        {"smells": ["7.smell", "6.smell"], "conversations": talk("<smell> or <smell>?", "Yes")},
        {"image": "a.ppm", "conversations": talk("<image> See?", "No")},
        {"conversations": talk("Hm.", "Hm")},
    ]
    (tmp_path / "dataset.json").write_text(json.dumps(records))
    return Config(
        model=ModelConfig(factory="tests.data.test_made_up_medium:build"),
        data=DataConfig(path=str(tmp_path), workers=1, prefetch=1, max_bad_fraction=0.5),
        train=TrainConfig(global_batch=7),
    )


def open_data(config, folder, **options):
    model = build_model(config.model)
    spec = MediaSpec.of(model.preprocessing, model.piece_tokens)
    return make_source(config.data, spec, index_dir=folder, vocab_size=model.vocab_size, **options)


def grains(config, *sizes):
    whiffs = []
    for n in sizes:
        data = np.fromfile(f"{config.data.path}/{n}.smell", np.uint8)
        whiffs.append(np.pad(data, (0, -n % GRAINS)).reshape(-1, GRAINS))
    return np.concatenate(whiffs)


def test_a_made_up_modality_is_loaded(config, tmp_path, caplog):
    source = open_data(config, tmp_path / "index")
    assert "a smell of 1 grains" in caplog.text
    assert "a picture of 8x8 pixels" in caplog.text
    assert len(source) == 7
    seen = [(5,), (6,), (7,), (20,), (40,), (7, 6), ()]
    for i, sizes in enumerate(seen):
        assert source.load(i).lengths("nose") == (GRAINS,) * sum(-(-n // GRAINS) for n in sizes)

    loader = make_loader(config, source)
    (samples,) = loader.batches([0], lambda step, samples: samples)
    assert [samples[k].load for k in range(7)] == loader.loads(0)
    for k, i in enumerate(loader.indices(0)):
        if sizes := seen[i]:
            values = samples[k].fields["nose"]["values"]
            np.testing.assert_array_equal(values, grains(config, *sizes))
            stand = samples[k].gathers["nose", "llm"].index[:, 0]
            assert (stand >= 0).sum() == samples[k].fields["llm"]["is_visual"].sum() == sum(sizes)
            assert stand.max() < values.size


def test_it_is_cut_blanked_and_refused_as_any_other(config, tmp_path):
    def changed(**fields):
        other = replace(config, data=replace(config.data, **fields))
        return open_data(other, tmp_path / "index", in_processes=False)

    source = changed(max_tokens=60)
    assert len(source) == 6  # without the one of 40 grains
    assert all(source.sample(i).load == source.load(i) for i in range(6))
    source = changed(blank_images=True)
    assert not source.sample(0).fields["nose"]["values"].any()
    with pytest.raises(ValueError, match="too faint a smell; come closer"):
        ask(config, "Sniff!", 1)
    with pytest.raises(ValueError, match="one <smell> for each of 2 smells"):
        ask(config, "<smell>!", 5, 7)
    sample = ask(config, "What is <smell>?", 5)
    np.testing.assert_array_equal(sample.fields["nose"]["values"], grains(config, 5))


def ask(config, prompt, *sizes):
    files = [f"{config.data.path}/{n}.smell" for n in sizes]
    return prompt_sample(prompt, {"smell": files}, config.data, Sniffer(), ByteTokenizer())


def test_a_form_that_is_not_there_is_one_line():
    for form in ("smells", "nowhere:FORM", "tests.data.media.smells:NONE"):
        with pytest.raises(ValueError, match=form) as caught:
            MediaSpec.of({"nose": {"form": form}}, {})
        assert "\n" not in str(caught.value)
    spec = MediaSpec.of({"nose": {"form": "tests.data.media.smells:FORM", "size": 3}}, {})
    with pytest.raises(ValueError, match=r"piece_tokens must be at least 1.*'size': 3"):
        make_source(DataConfig(), spec)
