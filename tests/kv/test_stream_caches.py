"""The worked example of SwiftCache, 3.2, and what its equations say at their ends."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ballast.kv.stream_caches import layer_block_bytes, layer_blocks, remote_blocks, stream_caches


def test_the_worked_example() -> None:
    caches = stream_caches(100, [9, 8], 10)
    assert caches == (17, 8)
    assert caches.longest == 25
    assert stream_caches(100, [], 10) == (0, 10)


def test_lenders_with_more_than_the_device_can_stage_leave_no_regular_cache() -> None:
    assert stream_caches(100, [90, 80], 10) == (100, 0)
    assert stream_caches(100, [90, 80], 10, slots=2) == (50, 0)


def test_sizes_of_a_model() -> None:
    layer = layer_block_bytes(16, 32, 128, 2)
    assert layer * 32 == 16 * (512 << 10), "LWM-7B: 0.5 MiB of KV a token"
    assert remote_blocks(layer * 32 * 3 + 5, layer, 32) == 3
    assert layer_blocks(layer * 7 - 1, layer) == 6


@given(st.integers(0, 500), st.lists(st.integers(0, 50), max_size=4), st.integers(1, 40))
def test_both_caches_fit_and_no_further_block_does(own: int, remote: list[int], n: int) -> None:
    caches = stream_caches(own, remote, n)
    left = own - caches.streamed - n * caches.regular
    assert 0 <= left < n or caches.streamed == own
    assert caches.longest >= own // n, "staging never shortens the longest context"
