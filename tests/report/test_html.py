"""The HTML page as text: its data, its escaping, what it says of runs that lack something."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dflop_jax.cli import main
from dflop_jax.records import SEND, Event, Trace
from dflop_jax.records.files import save
from dflop_jax.report.html import page
from dflop_jax.report.reader import read_runs
from dflop_jax.report.run_folder import PAGE, SIMULATED, RunFolder, read_plan
from dflop_jax.report.trace import read_trace, write_trace
from dflop_jax.train.callbacks import Evaluation
from tests.report.runs import make_plan, make_row, pipeline_trace


class Parsed(HTMLParser):
    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts.append(data.strip())

    def count(self, tag: str) -> int:
        return sum(t == tag for t, _ in self.tags)

    @property
    def data(self):
        at = [t for t, _ in self.tags if t in ("script", "style")].index("script")
        scripts = [x for x in self.texts if x.startswith('{"axes"')]
        assert (at, len(scripts)) == (1, 1)  # the page's style stands first
        return json.loads(scripts[0])


def page_of(folders, memory=None):
    return page(read_runs(folders), memory)


def test_the_data_hold_every_event_and_come_back(make_run):
    run = make_run()
    panels = Parsed(page_of([run])).data["panels"]
    assert [p["title"] for p in panels] == ["run, step 5, measured", "run, step 5, simulated"]
    for panel, (trace, labels) in zip(panels, read_trace(run / "trace.json"), strict=True):
        assert panel["makespan_s"] == trace.makespan_s
        back = [
            Event(panel["rows"][row]["name"], segment, group, direction, start_s, end_s)
            for row, start_s, end_s, _, segment, direction, group, _ in panel["tasks"]
        ]
        assert tuple(back) == trace.events
        assert labels == {0: "vision:8x16"}
        for *_, group, label in panel["tasks"]:
            assert label == ("vision 8 x 16 tokens" if group == 0 else "")
        busy = {name: f"{share:.0%}" for name, share in trace.busy_fraction().items()}
        assert {r["name"]: r["busy"] for r in panel["rows"]} == busy


def test_charts_are_drawn_over_the_steps(tmp_path):
    with RunFolder(tmp_path / "run") as run:
        run.write_plan(make_plan())
        for i in range(5):
            phases = {"forward": 0.1 * i, "idle": 0.01}
            run.append(make_row(i, phase_s=phases, n_bad=i % 2, imbalance={"llm": 0.1},
                                memory={"host_bytes": 2.0**31}, own={"x": i},
                                baseline_s={"blind": 0.1 * i} if i % 2 else {}))  # fmt: skip
        run.append_evaluation(Evaluation(3, 1.0, 0.5))
    data = Parsed(page_of([tmp_path / "run"])).data
    charts = {c["title"]: c for c in data["charts"]}

    def drawn(title, line=0):
        line = charts[title]["lines"][line]
        return line["name"], data["axes"][line["axis"]], line["y"]

    steps = [0, 1, 2, 3, 4]
    losses = pytest.approx([5.0 / (1 + i) for i in steps], rel=1e-5)
    assert drawn("loss") == ("loss", steps, losses)
    assert drawn("loss", 1) == ("held out", [3], [1.0])
    assert drawn("step time by phase") == ("forward", steps, pytest.approx([0, 0.1, 0.2, 0.3, 0.4]))
    assert drawn("samples replaced so far") == ("samples", steps, [0, 1, 1, 2, 2])
    assert drawn("x") == ("x", steps, steps)
    compared = "step simulated with and without data-aware scheduling"
    assert drawn(compared) == ("data-aware", [1, 3], [0.42, 0.42])
    assert drawn(compared, 1) == ("blind", [1, 3], pytest.approx([0.1, 0.3]))
    assert {"padding", "imbalance: fullest over mean data rank", "memory in use"} <= {*charts}
    assert "run: 5 steps" in Parsed(page_of([tmp_path / "run"])).texts


def test_memory_is_what_the_caller_knows(make_run):
    run = make_run()

    def memory(folder, plan, trace, labels):
        assert (folder, plan) == (run, read_plan(run))
        if trace.source == "simulated":
            raise ValueError("no table\nof bytes")
        return {"enc": ((0.0, 5.0), (0.1, 9.0), (0.2, 5.0)), "llm": ((0.0, 0.0),)}

    measured, simulated = Parsed(page_of([run], memory)).data["panels"]
    enc, llm = measured["memory"]
    assert (enc["name"], enc["times_s"], enc["bytes"]) == ("enc", [0.0, 0.1, 0.2], [5.0, 9.0, 5.0])
    assert (enc["peak"], llm["peak"]) == (9.0, 0.0)
    assert (measured["note"], simulated["memory"]) == ("", [])
    assert simulated["note"] == "memory over time is not known: no table of bytes"


BAD = "</script><script>window.bad=1</script><!--"


def test_no_name_breaks_out_of_the_page(tmp_path):
    folder = tmp_path / "x\"'><img src=x onerror=bad()>&amp;{{ 7*7 }}"
    events = (
        Event(BAD, BAD, 0, BAD, 0.0, 1.0),
        Event(f"{BAD} → b", BAD, 0, SEND, 1.0, 1.5),
        Event("no such", "b\u2028\\", 0, "backward", 1.5, 2.0),
    )
    plan = make_plan()
    meshes = (replace(plan.layout.submeshes[0], name=BAD), plan.layout.submeshes[1])
    segments = (replace(plan.layout.segments[0], submesh=BAD), plan.layout.segments[1])
    with RunFolder(folder) as run:
        run.write_plan(replace(plan, policy=BAD).with_layout(submeshes=meshes, segments=segments))
        run.append(make_row(0, padding_fraction={BAD: 0.5}))
        run.write_trace([Trace(0, BAD, events)], {0: BAD})
    parsed = Parsed(page_of([folder], lambda *_: {BAD: ((0.0, 1.0),)}))
    assert (parsed.count("script"), parsed.count("img")) == (2, 0)
    assert folder.name in parsed.texts  # the heading, to the letter
    panel = parsed.data["panels"][0]
    assert panel["title"] == f"{folder.name}, step 0, {BAD}"
    assert [r["name"] for r in panel["rows"]][:2] == [BAD, f"{BAD} → b"]
    assert panel["tasks"][0][4:] == [BAD, BAD, 0, BAD]
    assert panel["tasks"][2][4] == "b\u2028\\"
    assert panel["memory"][0]["name"] == BAD
    assert f"padding, {BAD}" in "\n".join(parsed.texts)


def test_several_runs_share_one_page(make_run):
    runs = [make_run("blind", slow=2.0, policy="blind"), make_run("dflop")]
    parsed = Parsed(page_of(runs))
    for tag, attributes in parsed.tags:  # the page loads nothing
        assert tag not in ("img", "iframe", "object", "embed", "base")
        assert "src" not in attributes
        assert attributes.get("href", "data:,") == "data:,"
    (policy,) = [a["content"] for _, a in parsed.tags if "http-equiv" in a]
    assert "default-src 'none'" in policy
    titles = [p["title"] for p in parsed.data["panels"]]
    assert [t.split(",")[0] for t in titles] == ["blind", "blind", "dflop", "dflop"]
    text = "\n".join(parsed.texts)
    assert "blind and dflop" in text
    assert "2.00 × as fast as blind" in text
    assert parsed.texts.index("speed-up") < parsed.texts.index("step time, median")
    assert "speed-up" not in Parsed(page_of(runs[:1])).texts  # of nothing
    assert "vision 0–3" in text
    assert "1 × 3 × 2" in text


def test_a_run_without_trace_keeps_its_tables(make_run):
    run = make_run()
    (run / "trace.json").unlink()
    parsed = Parsed(page_of([run]))
    assert parsed.data["panels"] == []
    assert "run: no trace, so no timeline; a run writes its trace when it ends." in parsed.texts
    assert "step time, median" in parsed.texts


def test_the_command_writes_the_page_also_of_what_was_only_simulated(
    make_run, tmp_path, capsys, monkeypatch
):
    def report(*args):
        code = main(["report", *map(str, args)])
        said = capsys.readouterr()
        return code, said.out, said.err

    monkeypatch.chdir(tmp_path)
    runs = [make_run("blind", slow=2.0), make_run("dflop")]
    code, out, _ = report(runs[1])
    assert code == 0
    assert str(runs[1] / PAGE) in out.replace("\n", "")
    assert "not known" in Parsed((runs[1] / PAGE).read_text()).data["panels"][0]["note"]
    assert report(*runs, "--out", "both/cmp.png")[0] == 0
    assert Path("both/cmp.html").exists()
    assert Path("both/cmp.png").exists()
    planned = tmp_path / "planned"
    planned.mkdir()
    save(make_plan(), planned / "plan.json")
    write_trace(planned / SIMULATED, [pipeline_trace({"enc": (1.0, 2.0)}, [1.0], "simulated")])
    code, out, _ = report(planned, "--json")
    assert (code, json.loads(out)) == (0, {"runs": []})
    code, out, _ = report(runs[1], planned, "--json", "--out", "c.html")
    assert [r["name"] for r in json.loads(out)["runs"]] == ["dflop"]
    texts = Parsed(Path("c.html").read_text()).texts
    assert "planned: simulated, no step trained; figures come with a training run." in texts
    (planned / SIMULATED).write_text("{}")
    (tmp_path / "file").write_text("")
    for args, why in [
        ([planned], "simulated.json: not a trace"), (["gone"], "gone: no such run folder"),
        ([runs[0], "--out", "file/x.html"], "file: is a file; choose another --out"),
    ]:  # fmt: skip
        code, _, err = report(*args)
        assert (code, err.count("\n")) == (2, 1)
        assert why in err


def test_every_file_of_the_page_is_package_data():
    root = Path(__file__).resolve().parents[2]
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    folder = root / "dflop_jax" / "report"
    globs = settings["package-data"]["dflop_jax.report"]
    shipped = {file for glob in globs for file in folder.glob(glob)}
    assert shipped == {f for f in folder.iterdir() if f.suffix not in (".py", "")}
