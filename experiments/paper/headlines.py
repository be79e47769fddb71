"""The papers' headlines as intervals over inputs that the papers do not state.

Command:  python -m experiments.paper --only headlines inputs
Inputs:   samples or sequences per step, their media, sizes of the towers; one at a time is changed
          in a set-up of the paper
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from scipy.stats import spearmanr

from experiments.paper import dflop, dip_models, orch
from experiments.paper.cases import Case
from experiments.paper.evaluation import DFLOP, MEGATRON, PUBLISHED, Evaluation, evaluate
from experiments.paper.results import Result

TOLERANCE = 0.05  # relative distance from a published figure that counts as reproduced
UNTUNED, TUNED = "untuned", "tuned"
# A figure over each baseline (UNTUNED, TUNED) that fits, or under "" if it concerns none.
Figures = Mapping[str, float]


@dataclass(frozen=True)
class Paper:
    """A paper's system, and the set-ups (by label) in which it is evaluated."""

    name: str
    system: str
    points: Mapping[str, Case]

    def compare(self, case: Case, measure: Callable[[Evaluation], float]) -> Figures:
        """Return a measure of each baseline over that of the system; {} if the system has no plan
        that fits."""
        systems = {UNTUNED: PUBLISHED} if case.untuned else {}
        found = {k: evaluate(case, s) for k, s in (systems | {TUNED: MEGATRON}).items()}
        own = evaluate(case, self.system)
        return {k: measure(a) / measure(own) for k, a in found.items() if a.fits and own.fits}

    def list_keys(self) -> list[tuple[Case, str]]:
        systems = (MEGATRON, self.system)
        return [
            (case, s)
            for case in self.points.values()
            for s in ((PUBLISHED, *systems) if case.untuned else systems)
        ]


PAPERS = {
    "DFLOP": Paper("DFLOP", DFLOP, dflop.POINTS),
    "DIP": Paper("DIP", "dip", dip_models.POINTS),
    "OrchMLLM": Paper("OrchMLLM", "orch", orch.POINTS),
}
KEYS = [key for paper in PAPERS.values() for key in paper.list_keys()]


def speed_ups(paper: Paper, case: Case) -> Figures:
    """Return the throughput over each baseline's."""
    return paper.compare(case, lambda evaluation: evaluation.step_s)


def idle_reductions(paper: Paper, case: Case) -> Figures:
    """Return by which share idle device-seconds are below each baseline's."""
    ratios = paper.compare(case, lambda evaluation: evaluation.idle_device_s)
    return {k: 1 - 1 / ratio for k, ratio in ratios.items()}


def mfus(paper: Paper, case: Case) -> Figures:
    """Return the system's model FLOPs utilisation."""
    evaluation = evaluate(case, paper.system)
    return {"": orch.compute_mfu(case, evaluation)} if evaluation.fits else {}


def format_ratio(value: float) -> str:
    return f"{value:.2f}x"


def format_gain(value: float) -> str:
    return f"{100 * (value - 1):+.0f}%"


def format_share(value: float) -> str:
    return f"{100 * value:.1f}%"


@dataclass(frozen=True)
class Headline:
    """A published figure (one, or the lowest and the highest), how it is computed and written."""

    paper: str
    text: str
    published: tuple[float, ...]
    measure: Callable[[Paper, Case], Figures] = speed_ups
    write: Callable[[float], str] = format_ratio
    models: str = ""  # only set-ups that have this in their name


HEADLINES = (
    Headline("DFLOP", "throughput", (1.2, 3.6)),
    Headline("DFLOP", "38 to 14 h", (38 / 14,), models="Qwen2.5-32B"),
    Headline("DFLOP", "24 to 10 h", (24 / 10,), models="Llama3-8B"),
    Headline("DFLOP", "60 to 22 h", (60 / 22,), models="InternViT-6B"),
    Headline("DFLOP", "less idle time", (0.82, 0.84), idle_reductions, format_share),
    Headline("DIP", "throughput", (1.156, 1.762), write=format_gain, models="VLM"),
    Headline("DIP", "throughput", (1.366, 1.973), write=format_gain, models="T2V"),
    Headline("OrchMLLM", "MFU", (0.416,), mfus, format_share),
    Headline("OrchMLLM", "throughput, up to", (3.1,)),
)


def measure_points(headline: Headline) -> dict[tuple[str, str], float]:
    """Return the figure at every point that the headline concerns, by (label, baseline)."""
    paper = PAPERS[headline.paper]
    return {
        (label, baseline): value
        for label, case in paper.points.items()
        if headline.models in case.name
        for baseline, value in headline.measure(paper, case).items()
    }


def describe_interval(headline: Headline, found: Mapping[tuple[str, str], float]) -> str:
    """Describe the lowest and highest figure over each baseline."""
    parts = []
    for baseline in dict.fromkeys(b for _, b in found):
        values = [value for (_, b), value in found.items() if b == baseline]
        span = " to ".join(map(headline.write, (min(values), max(values))))
        parts.append(f"{baseline} {span}".strip())
    return "; ".join(parts)


def describe_reproduction(headline: Headline, found: Mapping[tuple[str, str], float]) -> str:
    """Name, for each published value, the nearest point, or say that none is near enough."""
    if not found:
        return "no plan fits"
    parts = []
    for published in headline.published:
        error = {key: abs(value / published - 1) for key, value in found.items()}
        key = min(error, key=lambda key: error[key])
        where = f"{headline.write(found[key])} ({', '.join(filter(None, key))})"
        is_near = error[key] <= TOLERANCE
        nearest = where if is_near else f"none; nearest {where}"
        parts.append(f"{headline.write(published)}: {nearest}")
    return "; ".join(parts)


def compare_headlines(headlines: Sequence[Headline] = HEADLINES) -> Result:
    result = Result(
        "headlines",
        "Headlines, over inputs that the papers do not state",
        "see the table",
        "paper | figure | published | found, over the baseline | reproduced within "
        f"{TOLERANCE:.0%} by",
        on_first_page=True,
    )
    for headline in headlines:
        found = measure_points(headline)
        published = " to ".join(map(headline.write, headline.published))
        result.rows.append(
            [
                headline.paper,
                " ".join(filter(None, (headline.models, headline.text))),
                published,
                describe_interval(headline, found),
                describe_reproduction(headline, found),
            ]
        )
    n_points = sum(len(paper.points) for paper in PAPERS.values())
    result.summary = [
        f"{n_points} points: the papers' set-ups, and some of them with one input changed: "
        "samples or sequences per step, their media, size of the towers. Untuned: the baseline as "
        "its paper states it (OrchMLLM's is not known); tuned: the fastest Megatron-LM by "
        "simulation on other batches"
    ]
    return result


def compare_inputs(papers: Sequence[Paper] = tuple(PAPERS.values())) -> Result:
    """Compare all points, with the load of other modules over that of the LLM."""
    result = Result(
        "inputs",
        "Throughput over the baselines at every point",
        "DFLOP's gain is larger when encoder and LLM loads are nearly equal",
        "paper | set-up, changed input | over the untuned | over the tuned | other modules / LLM, "
        "device-seconds | idle | MFU",
    )
    for paper in papers:
        ratios, gains = [], []
        for label, case in paper.points.items():
            evaluation, over = evaluate(case, paper.system), speed_ups(paper, case)
            if not evaluation.fits:
                result.notes.append(f"{paper.name}, {label}: {evaluation.description}")
                continue
            ratio = load_ratio(evaluation)
            ratios.append(min(ratio, 1 / ratio) if ratio else 0.0)
            gains.append(over.get(TUNED, math.nan))
            cells = [format_ratio(over[k]) if k in over else "-" for k in (UNTUNED, TUNED)]
            mfu = format_share(mfus(paper, case)[""]) if paper.system == "orch" else "-"
            cells += [f"{ratio:.2f}", f"{evaluation.idle_share:.0%}", mfu]
            result.rows.append([paper.name, label, *cells])
        if paper.name == "DFLOP" and len(gains) > 2:
            rank = float(spearmanr(ratios, gains, nan_policy="omit").statistic)
            result.notes.append(
                "DFLOP: rank correlation of the gain over the tuned baseline with the equality of "
                f"loads: {rank:+.2f}"
            )
    return result


def load_ratio(evaluation: Evaluation) -> float:
    """Return the device-seconds of the other modules over those of the LLM."""
    device_seconds = {"llm": 0.0, "others": 0.0}
    assert evaluation.plan is not None, evaluation.description
    for s in evaluation.plan.layout.segments:
        device_s = evaluation.busy_s(s.name) * evaluation.plan.layout.submesh(s.submesh).n_devices
        device_seconds["llm" if s.module == "llm" else "others"] += device_s
    return device_seconds["others"] / device_seconds["llm"]
