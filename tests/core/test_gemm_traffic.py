"""Bytes of a HybridGEMM by its dataflow, against the paper's figure 4b and by counting tiles."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast.core.gemm_traffic import (
    GemmShape,
    GemmTile,
    hybrid,
    output_stationary,
    output_stationary_columns,
    weight_stationary,
)

FIGURE_4B = GemmShape(m=5120, n=8192, k=8192)
"""The paper states the traffic, not the GEMM: this one fits."""
TILE = GemmTile(128, 128, 64)
HELD = GemmTile(128, 128, 512)
HOPPER = 132


def test_weight_stationary_shifts_traffic_from_the_link_as_in_figure_4b() -> None:
    first = output_stationary(FIGURE_4B, TILE, HOPPER)
    last = weight_stationary(FIGURE_4B, HELD, HOPPER)
    assert first.link == pytest.approx(5.37e9, rel=1e-3)
    assert last.link == pytest.approx(0.134e9, rel=2e-3)
    assert last.device == pytest.approx(5.18e9, rel=5e-3)
    # 1.23 GB lies between one tile per multiprocessor at the same time, and two.
    assert output_stationary(FIGURE_4B, TILE, 2 * HOPPER).device < 1.23e9 < first.device


def test_the_share_moves_traffic_from_one_side_to_the_other() -> None:
    shares = [hybrid(FIGURE_4B, TILE, HELD, i / 8, HOPPER) for i in range(9)]
    assert shares[0] == weight_stationary(FIGURE_4B, HELD, HOPPER)
    assert shares[8] == output_stationary(FIGURE_4B, TILE, HOPPER)
    for low, high in pairwise(shares):
        assert low.link < high.link
    # A second part reads the activations, too, which costs as much as a fourth of the workspace.
    for low, high in pairwise(shares[2:]):
        assert low.device > high.device


def test_a_gemm_of_one_tile_of_rows_reads_its_weights_once_either_way() -> None:
    shape = GemmShape(m=1, n=4096, k=4096)
    for share in (0.0, 0.5, 1.0):
        assert hybrid(shape, TILE, HELD, share, HOPPER).link == shape.weight_bytes
    assert output_stationary(shape, TILE, HOPPER).device == 2 * (4096 + 4096)


def test_time_is_bound_by_the_slower_side() -> None:
    traffic = weight_stationary(FIGURE_4B, HELD, HOPPER)
    assert traffic.seconds(30e9, 4e12) == traffic.link / 30e9
    assert traffic.seconds(450e9, 1e12) == traffic.memory_seconds(1e12) > traffic.device / 1e12


def test_slices_turn_to_output_stationary_products_as_in_figure_4a() -> None:
    """4.0 ms against 16.4 on the whole GPU, about the same on three slices, slower on seven."""
    first = output_stationary(FIGURE_4B, TILE, HOPPER)
    last = weight_stationary(FIGURE_4B, HELD, HOPPER)
    assert last.seconds(427e9, 3.2e12) == pytest.approx(4.0e-3, rel=0.05)
    rates = (3.2e12 / part for part in (1, 4, 8))
    ratios = [last.seconds(427e9, rate) / first.seconds(427e9, rate) for rate in rates]
    assert ratios[0] < 0.35
    assert 0.8 < ratios[1] < 1.4
    assert ratios[2] > 2.0


@given(
    st.integers(1, 700),
    st.integers(1, 700),
    st.integers(1, 700),
    st.sampled_from([16, 64, 128]),
    st.sampled_from([32, 256]),
)
def test_traffic_is_what_tiles_load_and_store(
    m: int, n: int, k: int, side: int, depth: int
) -> None:
    shape, tile = GemmShape(m, n, k), GemmTile(side, side, depth)
    rows = [min(side, m - i) for i in range(0, m, side)]
    columns = [min(side, n - i) for i in range(0, n, side)]
    steps = [min(depth, k - i) for i in range(0, k, depth)]
    # Every program by itself: no cache saves anything.
    ours = output_stationary(shape, tile, 1)
    assert ours.link == sum(2 * c * k for _ in rows for c in columns)
    assert ours.device == sum(2 * r * k + 2 * r * c for r in rows for c in columns)
    theirs = weight_stationary(shape, tile, 1)
    assert theirs.link == sum(2 * c * s for c in columns for s in steps)
    loads = sum(
        2 * r * s + 4 * r * c * (i > 0) for c in columns for i, s in enumerate(steps) for r in rows
    )
    stores = sum(
        (4 if i + 1 < len(steps) else 2) * r * c
        for c in columns
        for i in range(len(steps))
        for r in rows
    )
    assert theirs.device == loads + stores


@given(st.integers(1, 5000), st.floats(0, 1), st.sampled_from([16, 128]))
def test_a_share_of_columns_is_whole_tiles_or_all(n: int, share: float, tile: int) -> None:
    columns = output_stationary_columns(n, share, tile)
    assert columns == n or (columns % tile == 0 and 0 <= columns < n)
    assert abs(columns - share * n) <= tile / 2 + 1e-9 or columns == n
    assert output_stationary_columns(n, 0.0, tile) == 0
    assert output_stationary_columns(n, 1.0, tile) == n
