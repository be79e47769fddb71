"""Answers of a trained model: through the command line, and what a careless user may type."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from dflop_jax.cli import main
from dflop_jax.config import Config, DataConfig, ModelConfig
from dflop_jax.data import ByteTokenizer, MediaSpec, make_source
from dflop_jax.generate.generate import Generator
from dflop_jax.generate.prompt import prompt_sample
from dflop_jax.generate.sampling import Sampling
from dflop_jax.records.files import save
from dflop_jax.train.load_params import load_params
from dflop_jax.train.run_context import build_model, count_compiles
from tests.generate.likeliest import assert_likeliest, n_compiled

from ..data.media_cases import noise, talk, write_clip, write_wav
from ..plans import NANO, nano_profile

EXPERIMENT = """
from dflop_jax import CheckpointConfig, Config, DataConfig, ModelConfig, PlanConfig, TrainConfig

def config():
    return Config(
        model=ModelConfig(size="nano"),
        data=DataConfig(n_samples=64, max_tiles=2, max_frames=4, max_tokens=128, workers=1),
        plan=PlanConfig(policy="dflop", devices=2, max_model=1, buckets=2, sampled_batches=1,
                        max_microbatches=4),
        train=TrainConfig(steps=2, global_batch=8),
        checkpoint=CheckpointConfig(every=1),
        run_dir="run",
        cache_dir="cache",
    )
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with an experiment, a run of it on a plan of two submeshes, and pictures."""
    folder = tmp_path_factory.mktemp("generate")
    jax.devices()  # started with conftest's 8, so that plan.devices cannot change their number
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("nano.py").write_text(EXPERIMENT)
        save(NANO, "plan.json")
        save(nano_profile(), "profile.json")
        Image.new("RGB", (60, 40), (220, 30, 30)).save("red.png")
        Image.new("RGB", (200, 30), (20, 170, 50)).save("wide.png")
        write_wav(Path("a.wav"), np.ones((1, 9000)), 16000)
        files = ("--plan-file", "plan.json", "--profile-file", "profile.json")
        assert main(["train", "nano.py", "--json", *files]) == 0
    return folder


@pytest.fixture(autouse=True)
def _there(trained, monkeypatch):
    monkeypatch.chdir(trained)


def run(capsys, *args):
    """(exit code, stdout, stderr) of `dflop generate`."""
    capsys.readouterr()
    try:
        code = main(["generate", *args])
    except SystemExit as e:  # argparse leaves by this door
        code = e.code
    out, err = capsys.readouterr()
    return code, out, err


SAVE_ANEW = "save it again in a common format (PNG, MP4, WAV), or give another file"
ASK = ("--prompt", "What colour is it?")


def test_an_answer_streams_and_is_the_same_as_json(capsys):
    code, out, err = run(capsys, "nano.py", *ASK, "--image", "red.png", "--max-tokens", "5")
    assert (code, "the answer is empty" in err) == (0, not out.strip())
    code, said, _ = run(capsys, "run", *ASK, "--image", "red.png", "--max-tokens", "5", "--json")
    assert code == 0
    answer = json.loads(said)
    assert out == answer["answer"] + "\n"
    assert answer["prompt"] == ASK[1]
    assert (answer["tiles"], answer["step"]) == (3, 2)
    assert answer["checkpoint"] == "run/checkpoints/00000002"
    assert len(answer["tokens"]) == 5 or answer["stopped"] == "end"
    assert ByteTokenizer().decode(answer["tokens"]) == answer["answer"]
    # An older checkpoint, and text alone.
    older = "--checkpoint", "run/checkpoints/00000001"
    code, said, _ = run(capsys, "nano.py", *older, *ASK, "--json")
    answer = json.loads(said)
    assert (code, answer["step"], answer["tiles"]) == (0, 1, 0)


MISTAKES = [
    (["gone.py", *ASK], "gone.py: no such run folder, folder of weights or experiment"),
    (["nano.py"], "give --prompt TEXT, or --prompts FILE"),
    (["nano.py", *ASK, "--prompts", "ask.jsonl"], "--prompts: its lines have prompts and"),
    (["nano.py", "--prompts", "gone.jsonl"], "gone.jsonl: no such file or directory; check"),
    (["nano.py", "--prompts", "empty.jsonl"], "empty.jsonl: is empty; write one line per"),
    (["nano.py", "--prompts", "ask.jsonl", "--batch", "0"], "--batch: 0 must be at least 1"),
    (["nano.py", "--prompts", "typo.jsonl"], "typo.jsonl:2: Object contains unknown field `im"),
    (["nano.py", "--prompt", " <image>\n", "--image", "red.png"], "the prompt is empty"),
    (["nano.py", *ASK, "--checkpoint", "gone"], "gone: no such run folder; check --checkpoint"),
    (["nano.py", *ASK, "--checkpoint", "empty"], "empty: no checkpoint in it; it is not a run"),
    (["nano.py", *ASK, "--run_dir", "young"], "young: no checkpoint in it; the run has not saved"),
    (["empty", *ASK], "empty: no config.json in it; give a run folder or an experiment file"),
    (["broken", *ASK], "broken/config.json: not a configuration"),
    (["nano.py", *ASK, "--image", "gone.png"], "gone.png: no such picture; check --image"),
    (["nano.py", *ASK, "--image", "run"], "run: is a folder, no picture; check --im"),
    (["nano.py", *ASK, "--image", "cut.png"], f"); {SAVE_ANEW}"),
    (["nano.py", "--prompt", "<image> What?"], "the prompt says <image>; it may have no tag"),
    (["nano.py", "--prompt", "<image><video>?", "--image", "red.png"],
     "the prompt says <image> <video>; it may have one <image> for each of 1 pictures"),
    (["nano.py", "--prompt", "x" * 200], "exceed data.max_tokens=128; shorten it, lower"),
    (["nano.py", *ASK, "--audio", "a.wav"], "the model hears no audio files; leave out a.wav"),
    (["nano.py", *ASK, "--temperature", "-1"], "temperature=-1.0 must be 0"),
    (["nano.py", *ASK, "--top-p", "0"], "top-p=0.0 must be above 0 and at most 1"),
    (["nano.py", *ASK, "--top-k", "-1"], "top-k=-1 must be at least 0"),
    (["nano.py", *ASK, "--stop", ""], "a stop text is empty"),
    (["nano.py", *ASK, "--repetition-penalty", "0"], "repetition-penalty=0.0 must be a finite"),
    (["nano.py", *ASK, "--tp", "3"], "--tp 3: does not divide this process's 8 devices"),
    (["nano.py", *ASK, "--max-tokens", "0"], "max-tokens=0 must be at least 1"),
    (["nano.py", *ASK, "--seed", "-1"], "seed=-1 must be from 0"),
    (["nano.py", *ASK, "--model.size", "tiny"], "give the experiment that it was trained with"),
]  # fmt: skip


@pytest.mark.parametrize("args, says", MISTAKES)
def test_mistakes_end_in_one_line(capsys, args, says):
    for folder in ("empty", "young", "broken"):
        Path(folder).mkdir(exist_ok=True)
    Path("young/config.json").write_text("{}")
    Path("broken/config.json").write_text('{"model": 3}')
    Path("cut.png").write_bytes(Path("red.png").read_bytes()[:60])
    Path("empty.jsonl").write_text("\n")
    Path("typo.jsonl").write_text('{"prompt": "?"}\n{"prompt": "?", "img": "red.png"}\n')
    code, out, err = run(capsys, *args)
    assert code == 2
    assert out == ""
    assert says in err
    assert err.count("\n") == 1


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path, caplog):
    shutil.copytree("run/checkpoints", tmp_path / "checkpoints")
    model = build_model(ModelConfig(size="nano"))
    for file in (tmp_path / "checkpoints/00000002").glob("process-*"):
        file.write_bytes(file.read_bytes()[:-9])
    assert load_params(tmp_path, model, jax.devices()[0]).step == 1
    assert "checkpoint of step 2 is damaged" in caplog.text
    (tmp_path / "checkpoints/00000001/manifest.json").write_text("{}")
    with pytest.raises(ValueError, match="no checkpoint is complete"):
        load_params(tmp_path, model, jax.devices()[0])


@pytest.mark.parametrize(
    "factory, size, kinds",
    [
        ("models.llava:build", "anyres-nano", ("image", "video", "image")),
        ("models.internvl:build", "internvl-nano", ("video", "image")),
        ("models.qwen3_vl:build", "qwen3-vl-nano", ("video", "image", "image")),
        ("models.qwen2_audio:build", "qwen2-audio-nano", ("audio", "audio")),
        ("models.omni:build", "omni-nano", ("audio", "image")),
    ],
)
def test_files_are_prepared_as_in_training(tmp_path, factory, size, kinds):
    """A prompt of several files equals the beginning of the sample of a dataset with them."""
    model, tokenizer = build_model(ModelConfig(factory, size)), ByteTokenizer()
    write_clip(tmp_path / "0.mp4", 5)
    write_wav(tmp_path / "0.wav", np.arange(6000).reshape(1, -1) % 800, 16000)
    write_wav(tmp_path / "1.wav", np.arange(3000).reshape(1, -1) % 500, 16000)
    for k in range(2):
        Image.fromarray(noise(40 + 30 * k, 70)).save(tmp_path / f"{k}.png")
    ends = {"image": "png", "video": "mp4", "audio": "wav"}
    media = {kind: [f"{k}.{ends[kind]}" for k in range(kinds.count(kind))] for kind in ends}
    question = "First " + " then ".join(f"<{kind}>" for kind in kinds) + ": what?"
    record = {"conversations": talk(question, "That."), **media}
    (tmp_path / "data.json").write_text(json.dumps([record]))
    data = DataConfig(
        path=str(tmp_path / "data.json"), max_tiles=2, max_frames=4, max_tokens=9999,
        min_pixels=1024, max_pixels=4096, workers=1,
    )  # fmt: skip
    spec = MediaSpec.of(model.preprocessing, model.piece_tokens)
    sample = make_source(data, spec, index_dir=tmp_path, in_processes=False).sample(0)
    files = {kind: [tmp_path / f for f in names] for kind, names in media.items()}
    prompt = prompt_sample(question, files, data, model, tokenizer)
    n = int(np.flatnonzero(sample.fields["llm"]["weights"])[0]) + 1
    assert prompt.load.tokens("llm") == n
    assert set(prompt.fields) == set(sample.fields)
    for module, named in sample.fields.items():
        assert prompt.load.lengths(module) == sample.load.lengths(module) or module == "llm"
        for name in named.keys() - {"targets", "weights"}:
            mine, theirs = prompt.fields[module][name], named[name]
            np.testing.assert_array_equal(mine, theirs[:n] if module == "llm" else theirs)
    assert prompt.gathers.keys() == sample.gathers.keys()
    for pair, places in sample.gathers.items():
        np.testing.assert_array_equal(prompt.gathers[pair].index, places.index[:n])
    untagged = prompt_sample("What?", files, data, model, tokenizer)
    assert untagged.load.lengths("vision") == prompt.load.lengths("vision") or len(kinds) > 2


def test_answers_equal_full_recomputation_and_compile_two_programs():
    config = Config(model=ModelConfig(size="nano"), data=DataConfig(max_tiles=2))
    generator = Generator(config, "run")
    shown = []
    answer = generator.answer("Is it red?", {"image": ["wide.png"]}, Sampling(4), shown.append)
    assert n_compiled(generator.programs) == 2
    assert "".join(shown) == answer.answer
    model = build_model(config.model)
    params = load_params("run", model, jax.devices()[0]).params
    media = {"image": ["wide.png"]}
    sample = prompt_sample("Is it red?", media, config.data, model, ByteTokenizer())
    assert len(sample.load.lengths("vision")) == 3  # padded to 4
    assert_likeliest(model, params, sample, answer.tokens)
    # Another question and another picture of as many tiles.
    sampling = Sampling(9, temperature=0.7, top_p=0.9)
    with count_compiles() as counts:
        generator.answer("Is this one blue?", {"image": ["red.png"]}, sampling)
    assert counts.compiled == 0


def test_the_end_token_ends_the_answer():
    generator = Generator(Config(model=ModelConfig(size="nano")), "run")
    llm = generator.loaded.params["llm"]
    # All logits become 0, of which the first is taken: id 0.
    llm["exit"]["norm"]["scale"] = jnp.zeros_like(llm["exit"]["norm"]["scale"])
    answer = generator.answer("?", {}, Sampling(3))
    assert (answer.tokens, answer.stopped) == ((0, 0, 0), "length")
    generator.end_ids |= {0}
    shown = []
    answer = generator.answer("?", {}, Sampling(3), shown.append)
    assert (answer.tokens, answer.stopped, answer.answer, shown) == ((), "end", "", [])
