"""The cost of a job: its linear form, the floor of a prefill, the tiles of a decode step."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast.core.cost import TILE, StepCosts, activation_bytes, lane_bytes
from ballast.core.job import JobLoad, chunk_pairs
from ballast.core.model import JobMemory, ModelSpec
from ballast.core.settings import DeviceSettings
from ballast.engine.sizing import largest_jobs

GPU = StepCosts(
    base=12e-3,
    per_token=7e-5,
    per_sequence=1e-4,
    per_context=4e-7,
    per_pair=3e-9,
    floor=12.5e-3,
    hidden=5e-3,
    per_tile=3e-3,
)
LINEAR = StepCosts(2e-3, 5e-5, 2e-4, 1e-7, 1e-9, 3e-3)
EXPERTS = replace(GPU, expert_reading=8e-3, not_chosen=0.75)
counts = st.integers(0, 5000)


def prefill(tokens: int) -> JobLoad:
    return JobLoad(tokens, 1, chunk_pairs(tokens, 0), 0, 0)


@st.composite
def loads(draw: st.DrawFn) -> JobLoad:
    chunks = draw(st.integers(0, 4))
    tokens = chunks * draw(st.integers(2, 500))
    sequences = draw(st.integers(0, 200))
    return JobLoad(
        tokens,
        chunks,
        draw(counts) if chunks else 0,
        sequences,
        sequences + draw(counts) if sequences else 0,
    )


def test_a_short_prefill_costs_the_floor_and_a_long_one_its_tokens() -> None:
    assert GPU.of(prefill(2)) == GPU.of(prefill(64)) == GPU.floor
    assert GPU.prefill_seconds(2048) == pytest.approx(7e-3 + 2048 * 7e-5 + 2048 * 2049 / 2 * 3e-9)


def test_a_decode_step_climbs_by_a_tile_every_64_sequences() -> None:
    def step(sequences: int) -> float:
        return GPU.of(JobLoad(0, 0, 0, sequences, 0))

    rise = GPU.per_sequence
    assert step(1) == pytest.approx(GPU.base + rise)
    assert step(TILE) - step(TILE - 1) == pytest.approx(rise)
    assert step(TILE + 1) - step(TILE) == pytest.approx(rise + GPU.per_tile)
    assert step(2 * TILE + 1) == pytest.approx(GPU.base + 129 * rise + 2 * GPU.per_tile)


@given(st.integers(1, 200), counts)
def test_steps_that_only_decode_cost_the_same_to_the_last_bit(n: int, context: int) -> None:
    for costs in (GPU, LINEAR, EXPERTS):
        assert costs.decoding(n)(context) == costs.of(JobLoad(0, 0, 0, n, context))


@given(st.integers(0, 5000))
def test_prefills_of_many_requests_cost_the_same_to_the_last_bit(tokens: int) -> None:
    for costs in (GPU, LINEAR, EXPERTS, replace(LINEAR, base=-1.0)):
        assert costs.prefilling()(tokens) == costs.prefill_seconds(tokens)


def test_a_job_that_does_both_makes_one_pass_over_the_weights() -> None:
    both = GPU.of(JobLoad(64, 1, chunk_pairs(64, 0), 8, 800))
    alone = GPU.of(prefill(64)) + GPU.of(JobLoad(0, 0, 0, 8, 800))
    assert both == pytest.approx(alone - GPU.base)


@given(loads())
def test_without_floor_and_tiles_the_form_is_linear(n: JobLoad) -> None:
    work = n.prefill_tokens * LINEAR.per_token + n.prefill_pairs * LINEAR.per_pair
    work += n.decode_sequences * LINEAR.per_sequence + n.decode_context * LINEAR.per_context
    work += n.prefill_chunks * LINEAR.per_chunk
    assert LINEAR.of(n) == pytest.approx(LINEAR.base + work)


@given(loads(), loads())
def test_more_work_beside_a_decode_never_takes_less(n: JobLoad, more: JobLoad) -> None:
    decoding = n._replace(decode_sequences=n.decode_sequences + 1)
    larger = JobLoad(*(a + b for a, b in zip(decoding, more, strict=True)))
    assert GPU.of(larger) >= GPU.of(decoding)


@given(loads(), st.floats(0.1, 10))
def test_scaled_costs_scale_every_job(n: JobLoad, factor: float) -> None:
    for costs in (GPU, EXPERTS):
        assert costs.scaled(factor).of(n) == pytest.approx(factor * costs.of(n))


def spec(name: str, memory: JobMemory | None) -> ModelSpec:
    return ModelSpec(
        name=name,
        n_layers=2,
        n_heads=4,
        kv_heads=2,
        head_dim=16,
        hidden=64,
        intermediate=128,
        vocab=256,
        dtype="float32",
        max_model_len=256,
        block_tokens=16,
        segment_bytes=(1,),
        fingerprint="0",
        job_memory=memory,
    )


def measured(kept: int, freed: int, tokens: int = 32, logits: int = 8) -> JobMemory:
    return JobMemory(step_tokens=tokens, step_logits=logits, kept=kept, freed=freed)


def test_what_stays_with_a_lane_is_there_beside_another_models_job() -> None:
    specs = [spec("fused", measured(100, 10)), spec("generic", measured(0, 70))]
    assert [activation_bytes(s, 32, 8) for s in specs] == [110, 70]
    assert lane_bytes(specs, 32, 8) == 170
    assert lane_bytes([], 32, 8) == 0


@pytest.mark.parametrize(("tokens", "logits"), [(33, 8), (32, 9)])
def test_of_larger_jobs_than_were_measured_there_is_an_estimate(tokens: int, logits: int) -> None:
    known, unknown = spec("a", measured(1, 2)), spec("b", None)
    assert activation_bytes(known, 16, 8) == 3
    estimate = activation_bytes(unknown, tokens, logits)
    assert activation_bytes(known, tokens, logits) == estimate > 1000
    assert lane_bytes([known, unknown], 32, 8) == 1 + activation_bytes(unknown, 32, 8)


def test_of_a_gpu_nothing_is_measured() -> None:
    device = DeviceSettings(budget_bytes=0, step_tokens=32, step_logits=8)
    on_gpu = replace(device, name="cuda:0")
    known, unknown = spec("a", measured(1, 2)), spec("b", None)
    assert largest_jobs([known], replace(device, lanes=3)) == 9
    assert largest_jobs([known], on_gpu) == largest_jobs([unknown], on_gpu)
