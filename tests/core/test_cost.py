"""The cost of a job: its linear form, the floor of a prefill, the tiles of a decode step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast.core.cost import TILE, StepCosts
from ballast.core.job import Load, chunk_pairs

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
counts = st.integers(0, 5000)


def prefill(tokens: int) -> Load:
    return Load(tokens, 1, chunk_pairs(tokens, 0), 0, 0)


@st.composite
def loads(draw: st.DrawFn) -> Load:
    chunks = draw(st.integers(0, 4))
    tokens = chunks * draw(st.integers(2, 500))
    sequences = draw(st.integers(0, 200))
    return Load(
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
        return GPU.of(Load(0, 0, 0, sequences, 0))

    rise = GPU.per_sequence
    assert step(1) == pytest.approx(GPU.base + rise)
    assert step(TILE) - step(TILE - 1) == pytest.approx(rise)
    assert step(TILE + 1) - step(TILE) == pytest.approx(rise + GPU.per_tile)
    assert step(2 * TILE + 1) == pytest.approx(GPU.base + 129 * rise + 2 * GPU.per_tile)


def test_a_job_that_does_both_makes_one_pass_over_the_weights() -> None:
    both = GPU.of(Load(64, 1, chunk_pairs(64, 0), 8, 800))
    alone = GPU.of(prefill(64)) + GPU.of(Load(0, 0, 0, 8, 800))
    assert both == pytest.approx(alone - GPU.base)


@given(loads())
def test_without_floor_and_tiles_the_form_is_linear(n: Load) -> None:
    work = n.prefill_tokens * LINEAR.per_token + n.prefill_pairs * LINEAR.per_pair
    work += n.decode_sequences * LINEAR.per_sequence + n.decode_context * LINEAR.per_context
    work += n.prefill_chunks * LINEAR.per_chunk
    assert LINEAR.of(n) == pytest.approx(LINEAR.base + work)


@given(loads(), loads())
def test_more_work_beside_a_decode_never_takes_less(n: Load, more: Load) -> None:
    decoding = n._replace(decode_sequences=n.decode_sequences + 1)
    larger = Load(*(a + b for a, b in zip(decoding, more, strict=True)))
    assert GPU.of(larger) >= GPU.of(decoding)


@given(loads(), st.floats(0.1, 10))
def test_scaled_costs_scale_every_job(n: Load, factor: float) -> None:
    assert GPU.scaled(factor).of(n) == pytest.approx(factor * GPU.of(n))
