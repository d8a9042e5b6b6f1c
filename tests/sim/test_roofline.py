"""What the roofline says of a model, and derates that are fitted to measured ones."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest

from ballast.core.cost import TILE, StepCosts
from ballast.core.job import JobLoad, chunk_pairs
from ballast.sim.model_catalogue import catalogue, facts
from ballast.sim.roofline import AllReduce, Derate, Hardware, Sizes, roofline
from scripts.derating import GroupDerate, Measured, fit_derate, fit_group, median_derate
from scripts.point_fits import Points

HARDWARE = Hardware(
    memory_bytes=80 * 10**9,
    memory_bandwidth=2e12,
    flops=300e12,
    multiprocessors=100,
    host_link="PCIe4 x16",
    host_bandwidth=31.5e9,
    peer_link="none",
    source="a test",
)
PEAK = Derate(
    layer_seconds=0,
    weights=1,
    floor=1,
    start=0,
    arithmetic=1,
    attention=1,
    sequence_seconds=0,
    kv=1,
    tile=0,
    group_layer_seconds=0,
    group_floor=1,
    group_start=0,
)
GROUP = GroupDerate(group_layer_seconds=4e-4, group_floor=1.6, group_start=0.55)
REAL = Derate(
    layer_seconds=8e-5,
    weights=1.4,
    floor=1.05,
    start=0.5,
    arithmetic=1.5,
    attention=1.8,
    sequence_seconds=1e-4,
    kv=2.0,
    tile=1.1,
    **asdict(GROUP),
)


def test_at_the_peaks_a_7b_takes_what_its_bytes_and_flops_do() -> None:
    model = facts("Llama-2-7b")
    costs = roofline(Sizes.of_facts(model), HARDWARE, PEAK)
    weights = 2 * (model.parameters - model.embedding)
    assert costs.of(JobLoad(0, 0, 0, 1, 0)) == pytest.approx(weights / 2e12)
    kv = 2 * 32 * 4096 * 2
    assert costs.of(JobLoad(0, 0, 0, 1, 1000)) == pytest.approx((weights + 1000 * kv) / 2e12)
    flops = 2 * 4096 * (model.parameters - 2 * model.embedding)
    flops += 4 * 32 * 4096 * chunk_pairs(4096, 0)
    assert costs.prefill_seconds(4096) == pytest.approx(flops / 300e12)


@pytest.mark.parametrize("name", ["Llama-2-7b", "Qwen2.5-0.5b", "Qwen3-8b", "Mixtral-8x7B"])
def test_a_spec_has_the_sizes_of_its_facts(name: str) -> None:
    model = facts(name)
    of_facts, of_spec = Sizes.of_facts(model), Sizes.of_spec(model.spec(max_model_len=4096))
    for key in ("layers", "pair_flops", "kv_bytes"):
        assert getattr(of_spec, key) == getattr(of_facts, key)
    assert of_spec.pass_bytes == pytest.approx(of_facts.pass_bytes, rel=1e-3)
    assert of_spec.active == pytest.approx(of_facts.active, rel=1e-2)


@pytest.mark.parametrize("name", ["Mixtral-8x7B", "Qwen3-30B-A3B"])
def test_a_pass_reads_the_experts_that_its_rows_are_expected_to_choose(name: str) -> None:
    model, derate = facts(name), PEAK
    costs = roofline(Sizes.of_facts(model), HARDWARE, derate)
    each = 2 * model.layers * 3 * model.hidden * model.intermediate
    dense = 2 * (model.layer_parameters + model.embedding) - model.experts * each
    for rows in (1, 2, 7, 64):
        chosen = model.experts * (1 - (1 - model.experts_per_token / model.experts) ** rows)
        step = costs.of(JobLoad(0, 0, 0, rows, 0))
        assert step == pytest.approx((dense + chosen * each) / 2e12)
        assert costs.decoding(rows)(0) == step
    assert costs.of(JobLoad(2, 2, 0, 0, 0)) < costs.of(JobLoad(0, 0, 0, 3, 0)) < costs.base
    assert costs.of(JobLoad(0, 0, 0, 2000, 0)) == pytest.approx(costs.base)
    of_spec = Sizes.of_spec(model.spec(max_model_len=4096))
    assert of_spec.expert_bytes == pytest.approx(Sizes.of_facts(model).expert_bytes, rel=0.02)
    assert of_spec.not_chosen == pytest.approx(Sizes.of_facts(model).not_chosen, rel=0.02)


def test_tied_embeddings_are_read_by_every_pass() -> None:
    model = facts("Qwen2.5-0.5b")
    assert model.tied
    assert Sizes.of_facts(model).pass_bytes == 2 * model.parameters


def points(model: str, phase: str) -> Points:
    costs = roofline(Sizes.of_facts(facts(model)), HARDWARE, REAL)
    taken = []
    for batch in (1, 2, 4, 8, 16, 32, TILE, 100, 150, 200):
        for length in (16, 32, 64, 128, 512, 1024, 4096):
            n = batch * length
            if n > 8192:
                continue
            pairs = batch * chunk_pairs(length, 0)
            load = (
                JobLoad(n, batch, pairs, 0, 0) if phase == "prefill" else JobLoad(0, 0, 0, batch, n)
            )
            taken.append((batch, n, costs.of(load)))
    return Points.of(taken)


def measured(model: str) -> Measured:
    return Measured(Sizes.of_facts(facts(model)), points(model, "prefill"), points(model, "decode"))


def test_a_derate_is_recovered_and_predicts_a_model_it_has_not_seen() -> None:
    seen = [measured(m) for m in ("Llama-2-7b", "Llama-2-13b", "Qwen2.5-7b", "Yi-1.5-9b-chat")]
    found = fit_derate(seen, HARDWARE, GROUP)
    for key, value in REAL.model_dump().items():
        assert getattr(found, key) == pytest.approx(value, rel=0.02), key
    costs = roofline(Sizes.of_facts(facts("Qwen3-14b")), HARDWARE, found)
    other = points("Qwen3-14b", "decode")
    steps = [
        costs.of(JobLoad(0, 0, 0, int(b), int(n)))
        for b, n in zip(other.batch, other.tokens, strict=True)
    ]
    assert np.abs(np.array(steps) / other.seconds - 1).max() < 0.02


def test_a_group_shares_the_work_and_pays_for_meeting() -> None:
    sizes = Sizes.of_facts(facts("Llama-2-70b"))
    alone = roofline(sizes, HARDWARE, PEAK)
    free = AllReduce(tp=4, least=0, base=0, per_byte=0, source="a test")
    ideal = roofline(sizes, HARDWARE, PEAK, free)
    assert ideal.of(JobLoad(0, 0, 0, 8, 8000)) == pytest.approx(
        alone.of(JobLoad(0, 0, 0, 8, 8000)) / 4
    )
    assert ideal.prefill_seconds(4096) == pytest.approx(alone.prefill_seconds(4096) / 4)

    paid = roofline(sizes, HARDWARE, PEAK, free.model_copy(update={"least": 5e-5}))
    assert paid.base - ideal.base == pytest.approx(2 * 80 * 5e-5)
    sent = roofline(sizes, HARDWARE, PEAK, free.model_copy(update={"per_byte": 1e-11}))
    assert sent.per_token - ideal.per_token == pytest.approx(2 * 80 * 1e-11 * 2 * 8192)
    hosted = roofline(sizes, HARDWARE, PEAK.model_copy(update={"group_layer_seconds": 1e-3}), free)
    assert hosted.base == pytest.approx(0.08)


def test_what_groups_show_is_taken_from_those_that_wait_for_the_host() -> None:
    def row(layers: int, base: float) -> tuple[int, StepCosts]:
        return layers, StepCosts(base, 0, 0, 0, 0, floor=1.5 * base, hidden=0.4 * base)

    found = fit_group([row(32, 32 * 4e-4), row(40, 40 * 4e-4), row(60, 0.029), row(80, 0.033)])
    assert found.group_layer_seconds == pytest.approx(4e-4, rel=0.03)
    assert (found.group_floor, found.group_start) == pytest.approx((1.5, 0.6))


def test_an_unmeasured_device_gets_the_median_factor_by_factor() -> None:
    other = REAL.model_copy(update={"weights": 9.0, "kv": 1.0})
    found = median_derate([PEAK, REAL, other])
    assert (found.weights, found.kv, found.arithmetic) == (1.4, 1.0, 1.5)


def test_every_model_of_the_catalogue_is_self_consistent() -> None:
    for model in catalogue().values():
        assert model.active_parameters <= model.parameters
        assert bool(model.experts) == bool(model.experts_per_token)
        spec = model.spec(max_model_len=4096)
        assert spec.weight_bytes == pytest.approx(2 * model.parameters, rel=1e-3)
