"""Fits of the costs' forms recover what made the points, and keep to their bounds."""

from __future__ import annotations

import random

import numpy as np
import pytest

from scripts.point_fits import (
    DecodeFit,
    Points,
    PrefillFit,
    errors,
    fit_decode,
    fit_prefill,
    pair_seconds,
)

PREFILL = PrefillFit(floor=13e-3, start=6e-3, per_token=7e-5, per_pair=3e-9)
DECODE = DecodeFit(base=12e-3, per_sequence=1e-4, per_context=4e-7, per_tile=3e-3)
GRID = [
    (batch, batch * length)
    for batch in (1, 2, 4, 8, 16, 40, 64, 80, 120, 160, 200)
    for length in (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
    if batch * length <= 4096
]


def timed(fit: PrefillFit | DecodeFit, noise: float = 0.0) -> Points:
    rng = random.Random(1)
    points = Points.of([(batch, tokens, 1.0) for batch, tokens in GRID])
    off = np.array([1 + rng.uniform(-noise, noise) for _ in GRID])
    return Points(points.batch, points.tokens, fit.seconds(points) * off)


def test_a_prefill_is_recovered() -> None:
    found = fit_prefill(timed(PREFILL))
    assert found.floor == pytest.approx(PREFILL.floor, rel=1e-3)
    assert found.start == pytest.approx(PREFILL.start, rel=1e-2)
    assert found.per_token == pytest.approx(PREFILL.per_token, rel=1e-3)
    assert found.per_pair == pytest.approx(PREFILL.per_pair, rel=1e-2)


def test_a_decode_step_is_recovered() -> None:
    found = fit_decode(timed(DECODE))
    for key in ("base", "per_sequence", "per_context", "per_tile"):
        assert getattr(found, key) == pytest.approx(getattr(DECODE, key), rel=1e-3), key


def test_noise_and_an_outlier_move_it_little() -> None:
    for fit, truth in ((fit_prefill, PREFILL), (fit_decode, DECODE)):
        points = timed(truth, noise=0.04)
        points.seconds[7] *= 3
        found = fit(points)
        clean = timed(truth)
        assert np.abs(errors(found, clean)).max() < 0.05


def test_attention_is_never_quicker_than_its_bound() -> None:
    assert fit_prefill(timed(PREFILL), 2 * PREFILL.per_pair).per_pair == 2 * PREFILL.per_pair
    found = fit_decode(timed(DECODE), 2 * DECODE.per_context)
    assert found.per_context == pytest.approx(2 * DECODE.per_context)


def test_attention_is_told_apart_from_products_that_curve() -> None:
    """Seconds that grow faster than tokens, alike for all lengths, are not attention's."""
    points = timed(PREFILL)
    curved = Points(points.batch, points.tokens, points.seconds + 2e-9 * points.tokens**2)
    assert pair_seconds(curved) == pytest.approx(PREFILL.per_pair, rel=0.1)


def test_leaving_one_out_leaves_the_others() -> None:
    points = timed(DECODE)
    fewer = points.without(3)
    assert len(fewer) == len(points) - 1
    assert points.seconds[3] not in fewer.seconds
    assert fewer.tokens[3] == points.tokens[4]
    assert errors(DECODE, points.only(3)) == pytest.approx([0.0])
