"""Plans, predictions and memory of the search, and what it refuses."""

import contextlib
import dataclasses
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from dflop_jax.plan.evaluate import LOOKAHEADS
from dflop_jax.plan.memory import peak_bytes
from dflop_jax.plan.placement import layout_name
from dflop_jax.plan.search import find_alternatives, search_plan
from dflop_jax.plan.search_spec import SearchSpec
from dflop_jax.plan.space import BASELINES, baseline_layouts
from dflop_jax.profile.cost_model import CostModel, layout_prices
from dflop_jax.records import Load, Plan, Predicted
from dflop_jax.schedule import quick_schedule, schedule_batch
from dflop_jax.schedule.batch import sample_batches
from dflop_jax.simulate.steps import simulate_step
from dflop_jax.simulate.task_order import peak_groups_in_flight
from tests.plans import NANO, params

from .cases import BATCH, CONFIG, LINKS, TILE, data_profile, model_profile, on, prepared, run


@pytest.mark.parametrize("policy", BASELINES)
def test_a_baseline_is_the_best_of_its_space(policy):
    result = run(policy, 4, n_shown=100)
    space = baseline_layouts(policy, 4, model_profile().n_layers, max_model=2, max_stage=2)
    assert {c.name for c in result.candidates} == {layout_name(p) for p in space}
    spans = [c.makespan_s for c in result.candidates]
    assert spans == sorted(spans)
    assert len(set(spans)) > 1
    assert result.plan.predicted.makespan_s == spans[0]


def profile_with_few_residuals():
    """A profile whose layers keep little of what they compute with where they compute it again."""
    whole = model_profile()
    timings = [dataclasses.replace(t, hidden_bytes=t.hidden_bytes / 20) for t in whole.timings]
    few = params({"vision": 100, "llm": 100})
    return dataclasses.replace(whole, timings=tuple(timings), layer_dims=few, ends_dims=few)


def test_options_save_memory_only_where_it_is_short():
    search = partial(run, profile=profile_with_few_residuals(), n_shown=100, refine=False)
    free, forced = search(), search(remat="layers", zero=3)
    assert {c.saving for c in free.candidates} == {"none"}
    limit = 0.6 * free.candidates[0].peak_bytes
    tight = search(memory_bytes=limit)
    assert any("llm layers" in c.saving for c in tight.candidates)
    assert all(c.peak_bytes <= limit for c in tight.candidates)
    assert {c.saving for c in forced.candidates} == {"vision layers ZeRO 3, llm layers ZeRO 3"}
    assert {(s.remat, s.zero) for s in forced.plan.layout.segments} == {("layers", 3)}
    assert forced.candidates[0].makespan_s > free.candidates[0].makespan_s


def test_state_is_sharded_within_nodes_where_memory_holds_it():
    """Two nodes of 2 and a slow network between them, heavy parameters that all are shared."""
    dims = params({"vision": 10**4, "llm": 10**7})
    heavy = dataclasses.replace(model_profile(degrees=(1,)), layer_dims=dims)
    slow = on(dataclasses.replace(LINKS, devices_per_node=2, network_bandwidth=1e5), heavy)

    def best(**options):
        options |= {"profile": slow, "zero": 3, "allowed": lambda m: m.stage == 1}
        return run("orch", 4, **options).candidates[0]

    def blocks(candidate):
        return {s.shard_devices for s in candidate.plan.layout.segments_of("llm")}

    free, of_all = best(), best(shard_devices=4)
    assert (blocks(free), blocks(of_all)) == ({2}, {4})
    assert free.makespan_s < of_all.makespan_s
    assert free.peak_bytes > 1.5 * of_all.peak_bytes
    tight = best(memory_bytes=1.05 * of_all.peak_bytes)
    assert blocks(tight) == {0}
    assert free.makespan_s < tight.makespan_s <= of_all.makespan_s


@pytest.mark.parametrize("n, ranked, expected", [
    (0, "oid", []), (2, "", []), (2, "o", []), (2, "oiid", [1, 3]), (1, "oiid", [1]),
    (2, "oxid", [2, 3]),  # x does not fit
    (2, "odi", [2, 1]),  # by the evaluated step
    (2, "osi", [2]),  # s is too slow
])  # fmt: skip
def test_best_plans_of_other_policies_are_alternatives(n, ranked, expected):
    """Evaluated on the same batches as the plan, which is the first of them."""
    seconds = {"o": 1.0, "i": 1.1, "d": 1.2, "x": 1.1, "s": 1.4}
    plans = [Plan(p, NANO.layout, predicted=Predicted(i)) for i, p in enumerate(ranked)]
    evaluator = SimpleNamespace(
        context=SimpleNamespace(spec=SimpleNamespace(max_alternatives=n)),
        fits=lambda plan: plan.policy != "x",
        evaluate=lambda plan, step_s: dataclasses.replace(
            plan, predicted=Predicted(seconds[plan.policy], chosen_by_s=step_s)
        ),
    )
    plan = Plan("o", NANO.layout, predicted=Predicted(2.0, chosen_by_s=1.0))
    found = find_alternatives(evaluator, plan, plans)
    assert [p.predicted.chosen_by_s for p in found] == expected


@pytest.mark.parametrize("policy", ["dflop", "blind"])
def test_predictions_equal_scheduled_batches(policy):
    """Makespan and busy shares of the simulated mean; memory by the depths of their orders. The
    batches are not those that the buckets were sized for."""
    found, costs = run(policy).plan, CostModel(model_profile())
    evaluator = prepared(3, config=dataclasses.replace(CONFIG, policy=policy))
    plan = evaluator.evaluate(found, found.predicted.makespan_s)  # by the work that it hides
    trainable = [s.name for s in plan.layout.segments]
    priced, work = (layout_prices(plan.layout, costs), trainable), found.scheduling.work_budget
    batches = sample_batches(data_profile().loads, BATCH, 8, seed=1)
    schedules = [schedule_batch(b, plan, *priced, step=i, work=work) for i, b in enumerate(batches)]
    traces = [simulate_step(plan, s, *priced) for s in schedules]
    depths = [peak_groups_in_flight(s.order) for s in schedules]
    predicted = plan.predicted
    assert predicted.makespan_s == pytest.approx(np.mean([t.makespan_s for t in traces]))
    assert predicted.chosen_by_s == predicted.makespan_s
    assert predicted.priced_by == "a formula"
    for m in plan.layout.submeshes:
        busy = np.mean([t.busy_fraction()[m.name] for t in traces])
        assert predicted.busy_fraction[m.name] == pytest.approx(busy)
    in_flight = {s: max(d.get(s, 0) for d in depths) for s in trainable}
    assert predicted.peak_bytes == pytest.approx(peak_bytes(plan.layout, costs, in_flight))


def test_memory_is_respected_and_the_missing_memory_stated():
    free = run(n_shown=100)
    peaks = sorted({c.peak_bytes for c in free.candidates})
    limit = peaks[len(peaks) // 2]
    tight = run(memory_bytes=limit)
    assert max(tight.plan.predicted.peak_bytes.values()) <= limit
    assert tight.plan.predicted.makespan_s >= free.plan.predicted.makespan_s
    assert tight.n_fit < tight.n_candidates == free.n_fit
    for result in (free, tight):  # however many options each is tried with
        assert 0 < result.n_evaluated <= result.n_fit
    dims = params({"vision": 2**28, "llm": 2**28})
    scaled = dataclasses.replace(model_profile(), layer_dims=dims)
    message = r"no plan fits into .*the smallest \(vision=.*llm.*\) needs .* GiB more; .* need less"
    with pytest.raises(ValueError, match=message) as failed:
        run(profile=scaled, memory_bytes=2.0**20)
    said = float(str(failed.value).split("needs ")[-1].split(" GiB")[0]) + 2**-10
    run(profile=scaled, memory_bytes=(said + 0.01) * 2**30, refine=False)
    with pytest.raises(ValueError, match="no plan fits"):
        run(profile=scaled, memory_bytes=(said - 0.01) * 2**30)


def test_small_jobs_have_plans():
    """One device, a model without encoder, a degree that was not timed, a sample that was not."""
    with pytest.raises(ValueError, match=r"dflop has no placement on 1 devices.*plan.policy auto"):
        run("dflop", 1)
    plan = run("blind", 1).plan
    assert plan.layout.n_devices == 1
    assert plan.scheduling.grouping == "arrival"
    assert run("auto", 1).plan.policy == "orch"
    one = model_profile(graph="one")
    for policy in ("dflop", "blind"):
        layout = run(policy, 2, profile=one, data=data_profile(tiles=False)).plan.layout
        assert (layout.modules, layout.n_devices) == (("llm",), 2)
    untimed = run(n_devices=4, profile=model_profile(degrees=(1,)), refine=False)
    assert all("x2@" not in c.name for c in untimed.candidates)
    data = data_profile()
    long = dataclasses.replace(data, loads=(*data.loads, Load({"vision": (TILE,), "llm": (1999,)})))
    assert max(b.tokens("llm") for b in run(data=long).plan.layout.buckets) >= 1999


def test_loops_have_the_configured_groups_and_rounds():
    """3 microbatches a stage, 2 rounds, and not the usual numbers; without stages one of each."""
    config = dataclasses.replace(CONFIG, policy="orch", microbatches_per_stage=3, rounds=2)
    spec = SearchSpec(2, BATCH, config, n_shown=20, refine=False)
    candidates = search_plan(model_profile(), data_profile(), spec).candidates
    stages = [max(m.stage for m in c.plan.layout.submeshes) for c in candidates]
    assert set(stages) == {1, 2}
    assert [c.group_size for c in candidates] == [6 if n == 2 else 1 for n in stages]
    assert [max(s.rounds for s in c.plan.layout.segments) for c in candidates] == stages
    assert all(("(2 rounds)" in c.name) == (n == 2) for c, n in zip(candidates, stages))


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.05, 8.0), (3.0, 0.3)])
def test_auto_takes_the_best_of_its_policies(weights):
    """By the makespan that candidates are ranked by, over what is left of the spaces: one policy
    has no placement that the devices can form in some of the cases."""
    search = partial(run, n_devices=4, profile=model_profile(*weights), refine=False)
    for allowed in (lambda m: True, lambda m: m.n_devices == 4, lambda m: m.n_devices == 2):
        best = {}
        for policy in ("dflop", "orch", "dip"):
            with contextlib.suppress(ValueError):
                best[policy] = search(policy, allowed=allowed).candidates[0].makespan_s
        chosen = search("auto", allowed=allowed)
        assert chosen.candidates[0].makespan_s == pytest.approx(min(best.values()), rel=2e-6)
        assert chosen.plan.policy == min(best, key=best.get)


@pytest.mark.parametrize("vision, pays", [(0.3, False), (3.0, True)])
def test_lookahead_is_the_shortest_that_is_fastest(vision, pays):
    """Against schedules with every lookahead: one is not worth memory for half a percent."""
    profile, config = model_profile(vision), dataclasses.replace(CONFIG, drift=0.0)
    plan = run("dflop", 4, profile=profile, refine=False).plan.with_scheduling(lookahead=0)
    free = prepared(4, profile, config=config)
    priced = free.context.price_layout(plan.layout), free.context.trainable(plan.layout)
    batches = free.evaluation_batches[: max(2, len(free.evaluation_batches) // 2)]

    def mean_s(n):
        ahead = plan.with_scheduling(lookahead=n)
        return np.mean([quick_schedule(b, ahead, *priced, 100).makespan_s for b in batches])

    least_s = min(map(mean_s, LOOKAHEADS))
    assert (least_s < 0.995 * mean_s(0)) == pays
    chosen = free.with_lookahead(plan).scheduling.lookahead
    assert mean_s(chosen) <= 1.005 * least_s
    assert (chosen > 0) == pays
    least_bytes = min(free.max_peak_bytes(plan.with_scheduling(lookahead=n)) for n in LOOKAHEADS)
    tight = prepared(4, profile, config=config, memory_bytes=least_bytes - 1)
    assert tight.with_lookahead(plan) == plan
