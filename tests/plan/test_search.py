"""Plans, predictions and memory of the search, and what it refuses.

Long because all its cases share one way to search.
"""

import contextlib
import dataclasses
from functools import partial

import numpy as np
import pytest

from dflop_jax.plan.best_first import BestFirstSearch, search_spaces
from dflop_jax.plan.candidate import CLOSE_RATIO
from dflop_jax.plan.evaluate import LOOKAHEADS, work_budget
from dflop_jax.plan.memory import peak_bytes
from dflop_jax.plan.placement import layout_name
from dflop_jax.plan.search import search_plan
from dflop_jax.plan.space import BASELINES, baseline_layouts
from dflop_jax.profile.cost_model import CostModel, layout_prices
from dflop_jax.records import Bucket, Load, Price, Shape, with_remat
from dflop_jax.schedule import quick_schedule, schedule_batch
from dflop_jax.schedule.sampled_batches import sample_batches
from dflop_jax.simulate.steps import simulate_step
from dflop_jax.simulate.task_order import peak_groups_in_flight
from tests.plans import params

from .cases import (
    BATCH,
    CONFIG,
    LINKS,
    TILE,
    data_profile,
    model_profile,
    on,
    prepared,
    run,
)


def most_bytes(plan):
    return max(plan.predicted.peak_bytes.values())


@pytest.mark.parametrize("policy", BASELINES)
def test_a_baseline_is_the_best_of_its_space(policy):
    config = dataclasses.replace(CONFIG, policy=policy)
    result = run(policy, 4, n_shown=100)
    names = {c.name for c in result.candidates}
    limits = {"max_model": config.max_model, "max_stage": config.max_stage}
    space = baseline_layouts(policy, 4, model_profile().n_layers, **limits)
    assert names == {layout_name(p) for p in space}
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
    free = run(profile=profile_with_few_residuals(), n_shown=100, refine=False)
    assert {c.saving for c in free.candidates} == {"none"}
    limit = 0.6 * free.candidates[0].peak_bytes
    tight = run(profile=profile_with_few_residuals(), memory_bytes=limit, n_shown=100, refine=False)
    assert any("llm layers" in c.saving for c in tight.candidates)
    assert all(c.peak_bytes <= limit for c in tight.candidates)
    forced = run(
        profile=profile_with_few_residuals(), remat="layers", zero=3, n_shown=100, refine=False
    )
    assert {c.saving for c in forced.candidates} == {"vision layers ZeRO 3, llm layers ZeRO 3"}
    assert {(s.remat, s.zero) for s in forced.plan.layout.segments} == {("layers", 3)}
    assert forced.candidates[0].makespan_s > free.candidates[0].makespan_s


def test_state_is_sharded_within_nodes_where_memory_holds_it():
    """Two nodes of 2 and a slow network between them, heavy parameters that all are shared."""
    heavy = dataclasses.replace(
        model_profile(degrees=(1,)), layer_dims=params({"vision": 10**4, "llm": 10**7})
    )
    slow = dataclasses.replace(LINKS, devices_per_node=2, network_bandwidth=1e5)

    def best(**options):
        options |= {"profile": on(slow, heavy), "zero": 3}
        return run("orch", 4, allowed=lambda m: m.stage == 1, **options).candidates[0]

    def blocks(candidate):
        layout = candidate.plan.layout
        assert layout.data_ranks("llm") == 4
        return {s.shard_devices for s in layout.segments_of("llm")}

    free, of_all = best(), best(shard_devices=4)
    assert (blocks(free), blocks(of_all)) == ({2}, {4})
    assert free.makespan_s < of_all.makespan_s
    assert free.peak_bytes > 1.5 * of_all.peak_bytes
    tight = best(memory_bytes=1.05 * of_all.peak_bytes)
    assert blocks(tight) == {0}
    assert free.makespan_s < tight.makespan_s <= of_all.makespan_s


def test_cheapest_options_depend_on_the_buckets():
    plan = with_remat(run(profile=profile_with_few_residuals()).plan, "layers")
    small, large = (
        plan.with_layout(
            buckets=(Bucket.from_shapes({"vision": Shape(9, TILE), "llm": Shape(1, t)}),)
        )
        for t in (96, 9600)
    )

    def evaluator(memory_bytes):
        return prepared(3, profile_with_few_residuals(), memory_bytes=memory_bytes, zero=1)

    def kept(plan, memory_bytes):
        found = evaluator(memory_bytes).with_cheapest_options(plan)
        return {s.module: s.remat for s in found.layout.segments}

    limit = evaluator(0.0).max_peak_bytes(large)
    assert kept(small, limit) == {"vision": "none", "llm": "none"}
    assert kept(large, limit)["llm"] in ("dots", "layers")
    assert kept(large, 0.0) == {"vision": "none", "llm": "none"}


@pytest.mark.parametrize("policy", ["dflop", "blind"])
def test_predictions_equal_scheduled_batches(policy):
    """Makespan and busy shares of the simulated mean; memory by the depths of their orders. The
    batches are not those that the buckets were sized for."""
    found, profile = run(policy).plan, model_profile()
    evaluator = prepared(3, profile, config=dataclasses.replace(CONFIG, policy=policy))
    plan = evaluator.evaluate(found, found.predicted.makespan_s)  # by the work that it hides
    trainable = [s.name for s in plan.layout.segments]
    prices = layout_prices(plan.layout, CostModel(profile))
    traces, depths = [], []
    small = sample_batches(data_profile().loads, BATCH, 8, seed=1)  # of which more are judged by
    for i, batch in enumerate(small):
        schedule = schedule_batch(
            batch, plan, prices, trainable, step=i, work=found.scheduling.work_budget
        )
        traces.append(simulate_step(plan, schedule, prices, trainable))
        depths.append(peak_groups_in_flight(schedule.order))
    predicted = plan.predicted
    assert predicted.makespan_s == pytest.approx(np.mean([t.makespan_s for t in traces]))
    assert predicted.chosen_by_s == predicted.makespan_s
    assert predicted.priced_by == "a formula"
    for m in plan.layout.submeshes:
        busy = np.mean([t.busy_fraction()[m.name] for t in traces])
        assert predicted.busy_fraction[m.name] == pytest.approx(busy)
    in_flight = {s: max(d.get(s, 0) for d in depths) for s in trainable}
    assert predicted.peak_bytes == pytest.approx(
        peak_bytes(plan.layout, CostModel(profile), in_flight)
    )


def test_work_budget_hides_in_the_step():
    profile, plan = model_profile(), run().plan
    hidden = work_budget(plan.predicted.makespan_s, shares_cores=profile.shares_cores)
    assert plan.scheduling.work_budget == hidden > 0
    for shares_cores in (False, True):
        hidden = partial(work_budget, shares_cores=shares_cores)
        assert hidden(2.0) == pytest.approx(2 * hidden(1.0))
        assert hidden(1e-9) == 1  # 0 would be the scheduler's default
    assert work_budget(1.0, shares_cores=True) < work_budget(1.0, shares_cores=False)


def test_timed_programs_decide_between_finalists():
    """The plan that the profile ranks first turns out slow."""
    profile, asked = model_profile(), []

    def time_plan(plan):
        asked.append(plan)
        prices = layout_prices(plan.layout, CostModel(profile))
        slow = 3.0 if len(asked) == 1 else 1.2
        programs = {k: Price(slow * p.static_s) for k, p in prices.programs.items()}
        return dataclasses.replace(prices, programs=programs)

    untimed = run(effort="full", n_devices=4)
    timed = run(effort="full", n_devices=4, time_plan=time_plan)
    assert 2 <= len(asked) == timed.n_timed <= CONFIG.finalists
    assert len({repr((p.layout.segments, p.layout.buckets)) for p in asked}) == len(asked)
    assert asked[0] == untimed.plan
    assert untimed.n_timed == 0
    by_profile = [p.predicted.makespan_s for p in asked]
    assert (
        timed.plan.layout.buckets != untimed.plan.layout.buckets
        or timed.plan.layout.segments != asked[0].layout.segments
    )
    predicted = timed.plan.predicted
    assert predicted.chosen_by_s == predicted.makespan_s  # not the profile's, which chose no plan
    assert min(by_profile[1:]) < predicted.makespan_s < 1.5 * max(by_profile[1:])
    hidden = work_budget(predicted.makespan_s, shares_cores=profile.shares_cores)
    assert timed.plan.scheduling.work_budget == hidden


def test_host_work_per_task_makes_groups_larger():
    """Five, or where the host needs half of what a step took for each task one of half as much
    again at least."""
    profile = model_profile()
    free = run(profile=profile)
    step_s = free.plan.predicted.makespan_s
    bound = run(profile=dataclasses.replace(profile, host_s=step_s / 2))
    assert [r.candidates[0].groups_per_batch for r in (free, bound)] == [5, 1]
    layouts = [r.plan.layout for r in (free, bound)]
    sizes = [max(s.size for s in x.shapes("llm")) * x.group_size for x in layouts]
    assert sizes[1] >= 1.5 * sizes[0]
    # A group of both modules keeps the host at work three times, one segment after the other.
    assert bound.plan.predicted.makespan_s >= 3 * step_s / 2
    prices = layout_prices(
        bound.plan.layout, CostModel(dataclasses.replace(profile, host_s=step_s / 2))
    )
    assert min(p.static_s for p in prices.programs.values()) >= step_s / 2


def test_memory_is_respected():
    free = run(n_shown=100)
    peaks = sorted({c.peak_bytes for c in free.candidates})
    limit = peaks[len(peaks) // 2]
    tight = run(memory_bytes=limit)
    assert most_bytes(tight.plan) <= limit
    assert tight.plan.predicted.makespan_s >= free.plan.predicted.makespan_s
    assert tight.n_fit < tight.n_candidates == free.n_fit
    assert 0 < tight.n_evaluated <= tight.n_fit  # however many options each is tried with
    assert 0 < free.n_evaluated <= free.n_fit
    # Just below the smallest of all, nothing is left.
    with pytest.raises(
        ValueError, match=r"no plan fits into .*\(vision=.*llm.*\).* GiB more; .* need less"
    ):
        run(memory_bytes=1.0)


def test_error_states_the_missing_memory():
    scaled = dataclasses.replace(
        model_profile(), layer_dims=params({"vision": 2**28, "llm": 2**28})
    )
    with pytest.raises(ValueError, match=r"the smallest .* needs") as failed:
        run(profile=scaled, memory_bytes=2.0**20)
    said = float(str(failed.value).split("needs ")[-1].split(" GiB")[0]) + 2**-10
    run(profile=scaled, memory_bytes=(said + 0.01) * 2**30)
    with pytest.raises(ValueError, match="no plan fits"):
        run(profile=scaled, memory_bytes=(said - 0.01) * 2**30)


def test_small_jobs_have_plans():
    """One device, a model without encoder, a degree that was not timed."""
    with pytest.raises(ValueError, match=r"dflop has no placement on 1 devices.*plan.policy auto"):
        run("dflop", 1)
    plan = run("blind", 1).plan
    assert plan.layout.n_devices == 1
    assert plan.scheduling.grouping == "arrival"
    assert {s.module for s in plan.layout.segments} == {"vision", "llm"}
    assert run("auto", 1).plan.policy == "orch"
    one = model_profile(graph="one")
    for policy in ("dflop", "blind"):
        layout = run(policy, 2, profile=one, data=data_profile(tiles=False)).plan.layout
        assert (layout.modules, layout.n_devices) == (("llm",), 2)
    untimed = run(n_devices=4, profile=model_profile(degrees=(1,)))
    assert all("x2@" not in c.name for c in untimed.candidates)


def test_a_tied_head_may_lie_apart_from_its_embedding():
    profile = model_profile(tied=("llm",))
    result = run(n_devices=4, profile=profile, n_shown=100, refine=False)
    assert result.plan.layout.tied == ("llm",)
    apart = [c for c in result.candidates if "llm=2*" in c.name]
    assert apart
    # Both segments hold what they share, so the one with the head needs more.
    untied = {c.name: c.peak_bytes for c in run(n_devices=4, n_shown=100, refine=False).candidates}
    assert any(c.peak_bytes > untied[c.name] for c in apart)


def test_loops_have_the_configured_groups_and_rounds():
    """3 microbatches a stage, 2 rounds, and not the usual numbers; without stages one of each."""
    config = dataclasses.replace(CONFIG, policy="orch", microbatches_per_stage=3, rounds=2)
    result = search_plan(
        model_profile(), data_profile(), n_devices=2, global_batch=BATCH, config=config,
        refine=False, n_shown=20,
    )  # fmt: skip
    stages = [max(m.stage for m in c.plan.layout.submeshes) for c in result.candidates]
    assert set(stages) == {1, 2}
    sizes = [c.group_size for c in result.candidates]
    assert sizes == [6 if n == 2 else 1 for n in stages]
    rounds = [max(s.rounds for s in c.plan.layout.segments) for c in result.candidates]
    assert rounds == stages
    assert all(("(2 rounds)" in c.name) == (n == 2) for c, n in zip(result.candidates, stages))


POLICIES = ("dflop", "orch", "dip")


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.05, 8.0), (3.0, 0.3)])
def test_auto_takes_the_best_of_its_policies(weights):
    """By the makespan that candidates are ranked by, over what is left of the spaces: one policy
    has no placement that the devices can form in some of the cases."""
    profile = model_profile(*weights)
    for allowed in (lambda m: True, lambda m: m.n_devices == 4, lambda m: m.n_devices == 2):
        best = {}
        for policy in POLICIES:
            with contextlib.suppress(ValueError):
                found = run(policy, 4, profile=profile, allowed=allowed, refine=False)
                best[policy] = found.candidates[0].makespan_s
        chosen = run("auto", 4, profile=profile, allowed=allowed, refine=False)
        assert chosen.candidates[0].makespan_s == pytest.approx(min(best.values()), rel=2e-6)
        assert chosen.plan.policy == min(best, key=best.get)


@pytest.mark.parametrize("policy", POLICIES)
def test_screen_of_a_policy_finds_its_best(policy):
    """Where a few simulations tell it; and nothing beyond what is asked for."""
    config = dataclasses.replace(CONFIG, policy="auto", sampled_batches=1, max_microbatches=2)
    evaluator = prepared(4, config=config)
    ranking = BestFirstSearch(evaluator, list(search_spaces(evaluator.context)), ())
    best, *others = ranking.screen_policy(policy, np.inf)
    alone = search_plan(
        model_profile(), data_profile(), n_devices=4, global_batch=BATCH,
        config=dataclasses.replace(config, policy=policy), refine=False,
    ).candidates[0]  # fmt: skip
    assert (best.policy, best.name, best.lower_bound_s) == (policy, alone.name, alone.makespan_s)
    spans = [c.lower_bound_s for c in (best, *others)]
    assert spans == sorted(spans)
    assert spans[-1] <= CLOSE_RATIO * spans[0]
    assert len({c.granularity for c in (best, *others)}) == len(spans)
    assert ranking.screen_policy(policy, 1.001 * best.lower_bound_s)[0] == best
    assert ranking.screen_policy(policy, 0.999 * best.lower_bound_s) == []


def test_trials_have_batches_of_their_own_some_drifted():
    evaluator = prepared(4)
    trials = [evaluator.trial_batches(i) for i in range(4)]
    assert [len(batches) for batches in trials] == [2] * 4
    assert all(len(batch) == BATCH for batches in trials for batch in batches)
    each = [b for t in trials for b in t]
    others = (*evaluator.batches, *evaluator.evaluation_batches)
    assert len({tuple(map(repr, b)) for b in (*each, *others)}) == len(each) + len(others)
    plan = run(n_devices=4).plan

    def with_drift(share):
        return prepared(4, config=dataclasses.replace(CONFIG, drift=share)).simulate_trial(plan, 1)

    assert with_drift(0.0) != with_drift(1.0)
    share = CONFIG.drift
    expected_s = (1 - share) * with_drift(0.0) + share * with_drift(1.0)
    assert evaluator.simulate_trial(plan, 1) == pytest.approx(expected_s)


def test_submeshes_that_devices_cannot_form_are_left_out():
    every = run("dflop", 4, n_shown=100, refine=False).candidates
    some = run("dflop", 4, allowed=lambda m: m.n_devices == 2, n_shown=100, refine=False).candidates
    assert {c.name for c in some} == {c.name for c in every if "@2" in c.name and "*" not in c.name}
    with pytest.raises(ValueError, match="the devices at hand cannot form"):
        run("dflop", 4, allowed=lambda m: False)


def test_no_microbatch_is_far_larger_than_what_was_timed(real_buckets):
    """Where calls cost all and tokens nothing, one huge group is the fastest by extrapolation."""
    whole = model_profile()
    timings = tuple(
        dataclasses.replace(t, layer_forward_s=1.0, layer_backward_s=3.0) for t in whole.timings
    )
    small = tuple(
        dataclasses.replace(t, shape=Shape(t.shape.rows, t.shape.tokens // 4))
        if t.module == "llm"
        else t
        for t in timings
    )

    def size(timings, hardware=None):
        profile = on(hardware, dataclasses.replace(whole, timings=timings))
        plan = run(n_devices=2, profile=profile).plan
        return max(b.tokens("llm") for b in plan.layout.buckets)

    assert size(timings) > 128 >= size(small)  # timed up to 256 and 64 tokens
    assert size(small, LINKS) == size(timings)  # formulas hold at any size


def test_a_sample_larger_than_what_was_timed_still_has_a_plan():
    profile, data = model_profile(), data_profile()
    long = dataclasses.replace(data, loads=(*data.loads, Load({"vision": (TILE,), "llm": (1999,)})))
    plan = run(profile=profile, data=long).plan
    assert max(b.tokens("llm") for b in plan.layout.buckets) >= 1999


@pytest.mark.parametrize("vision, pays", [(0.3, False), (3.0, True)])
def test_lookahead_is_the_shortest_that_is_fastest(vision, pays):
    """Against schedules with every lookahead: one is not worth memory for half a percent."""
    profile = model_profile(vision)
    plan = run("dflop", 4, profile=profile, refine=False).plan.with_scheduling(lookahead=0)
    config = dataclasses.replace(CONFIG, drift=0.0)

    def evaluator(memory_bytes):
        return prepared(4, profile, config=config, memory_bytes=memory_bytes)

    free = evaluator(0.0)
    names = free.context.trainable(plan.layout)

    def mean_s(lookahead):
        ahead, prices = plan.with_scheduling(lookahead=lookahead), free.prices(plan.layout)
        batches = free.evaluation_batches[: max(2, len(free.evaluation_batches) // 2)]
        each = [quick_schedule(b, ahead, prices, names, 100).makespan_s for b in batches]
        return float(np.mean(each))

    without_s = mean_s(0)
    least_s = min(map(mean_s, LOOKAHEADS))
    assert (least_s < 0.995 * without_s) == pays
    chosen = free.with_lookahead(plan).scheduling.lookahead
    assert mean_s(chosen) <= 1.005 * least_s
    assert (chosen > 0) == pays
    least_bytes = min(free.max_peak_bytes(plan.with_scheduling(lookahead=n)) for n in LOOKAHEADS)
    assert evaluator(least_bytes - 1).with_lookahead(plan) == plan
