"""Layouts: blocks and slabs fit each other exactly, and waste little for usual models."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast.core.errors import ConfigError
from ballast.core.model import ModelSpec
from ballast.core.units import KiB, MiB
from ballast.kv.layout import ALIGNMENT, GOOD_WASTE, Layout, choose, fitted

SPEC = ModelSpec(
    name="m",
    n_layers=1,
    n_heads=1,
    kv_heads=1,
    head_dim=4,
    hidden=4,
    intermediate=4,
    vocab=2,
    dtype="float32",
    max_model_len=64,
    block_tokens=16,
    segment_bytes=(1,),
    fingerprint="f",
)
USUAL = {
    # name: (layers, kv heads, head dim, bytes per element)
    "Llama-3.2-1B": (16, 8, 64, 2),
    "Llama-3.2-3B": (28, 8, 128, 2),
    "Llama-3.1-8B": (32, 8, 128, 2),
    "Llama-3.1-70B": (80, 8, 128, 2),
    "Llama-2-13B": (40, 40, 128, 2),
    "Qwen2.5-0.5B": (24, 2, 64, 2),
    "Qwen2.5-3B": (36, 2, 128, 2),
    "Qwen2.5-7B": (28, 4, 128, 2),
    "Qwen3-8B": (36, 8, 128, 2),
    "SmolLM2-135M": (30, 3, 64, 2),
    "TinyLlama-1.1B": (22, 4, 64, 2),
    "Gemma-2-2B": (26, 4, 256, 2),
    "OPT-125M, float32": (12, 12, 64, 4),
}


@pytest.mark.parametrize("page_bytes", [256 * KiB, 2 * MiB])
@pytest.mark.parametrize("name", USUAL)
def test_usual_models_waste_little(name: str, page_bytes: int) -> None:
    layers, kv_heads, head_dim, element = USUAL[name]
    block_bytes = layers * 2 * kv_heads * head_dim * element * 16
    pages, blocks = choose(block_bytes, page_bytes)
    waste = 1 - blocks * block_bytes / (pages * page_bytes)
    assert 0 <= waste <= 0.101
    assert pages <= 8 or (blocks <= 8 and pages * page_bytes <= 8 * block_bytes + page_bytes)


def test_a_block_that_divides_a_page_takes_single_pages() -> None:
    assert choose(64 * KiB, 256 * KiB) == (1, 4)
    assert choose(256 * KiB, 256 * KiB) == (1, 1)


def test_a_slab_of_several_pages_saves_what_a_single_page_would_waste() -> None:
    # 192 KiB in 256 KiB would waste a quarter.
    assert choose(192 * KiB, 256 * KiB) == (3, 4)


def test_a_block_larger_than_a_page_takes_whole_pages() -> None:
    assert choose(8 * MiB, 2 * MiB) == (4, 1)
    assert choose(2304 * KiB, 2 * MiB) == (9, 8)


@given(block=st.integers(1, 200_000), lines=st.sampled_from([1, 4, 16, 64, 1024]))
def test_every_slab_divides_exactly(block: int, lines: int) -> None:
    page = lines * ALIGNMENT
    pages, blocks = choose(block, page)
    assert pages >= 1
    assert blocks >= 1
    stride, rest = divmod(pages * page, blocks)
    assert rest == 0
    assert stride % ALIGNMENT == 0
    assert stride >= block


@given(block=st.integers(1, 50_000))
def test_no_smaller_slab_would_have_done(block: int) -> None:
    page = 4096
    pages, blocks = choose(block, page)
    waste = 1 - blocks * block / (pages * page)
    for fewer in range(1, pages):
        strides = [s for s in range(ALIGNMENT, fewer * page + 1, ALIGNMENT) if s >= block]
        most = max((fewer * page // s for s in strides if fewer * page % s == 0), default=0)
        smaller_waste = 1 - most * block / (fewer * page)
        assert smaller_waste > GOOD_WASTE
        assert smaller_waste > waste or waste <= GOOD_WASTE


@pytest.mark.parametrize(("block", "page"), [(0, 4096), (64, 0), (64, 100)])
def test_sizes_that_cannot_be_laid_out_are_refused(block: int, page: int) -> None:
    with pytest.raises(ConfigError):
        choose(block, page)


def test_the_layout_of_a_model() -> None:
    spec = ModelSpec(
        name="m",
        n_layers=24,
        n_heads=14,
        kv_heads=2,
        head_dim=64,
        hidden=896,
        intermediate=4864,
        vocab=100,
        dtype="bfloat16",
        max_model_len=1024,
        block_tokens=16,
        segment_bytes=(1,),
        fingerprint="f",
    )
    layout = Layout.of(spec, 256 * KiB)
    assert layout.shape == (24, 2, 16, 2, 64)
    assert (layout.slab_pages, layout.blocks_per_slab, layout.waste) == (3, 4, 0.0)
    assert layout.stride_bytes == layout.block_bytes == spec.block_bytes
    assert [layout.pages(n) for n in (0, 1, 4, 5)] == [0, 3, 3, 6]


@pytest.mark.parametrize(
    ("token_kib", "page_mib", "tokens", "blocks"),
    [
        (32, 2, 16, 4),  # Llama-3.2-1B: as it is
        (128, 32, 16, 16),  # Llama-3.1-8B
        (12, 2, 21, 8),  # Qwen2.5-0.5B
        (144, 8, 14, 4),  # Qwen3-8B
        (22.5, 0.25, 11, 1),  # SmolLM2-135M
        (512, 2, 4, 1),  # Llama-2-7B
        (800, 16, 20, 1),  # OPT-13B
        (2560, 2, 16, None),  # no block of four tokens fits
    ],
)
def test_blocks_are_fitted_to_pages(
    token_kib: float, page_mib: float, tokens: int, blocks: int | None
) -> None:
    spec = replace(SPEC, kv_heads=1, n_layers=1, dtype="bfloat16", block_tokens=16)
    spec = replace(spec, head_dim=round(token_kib * 256))
    page = round(page_mib * MiB)
    there = fitted(spec, None, page)
    assert there.block_tokens == tokens
    layout = Layout.of(there, page)
    assert layout.slab_pages == 1 if blocks else layout.slab_pages > 1
    assert blocks in (None, layout.blocks_per_slab)
    assert layout.waste <= GOOD_WASTE
    assert fitted(spec, 7, page).block_tokens == 7


def test_whatever_a_token_takes_blocks_of_a_page_are_found_or_left() -> None:
    for head_dim in range(2, 4000, 13):
        spec = replace(SPEC, head_dim=head_dim, block_tokens=16)
        there = fitted(spec, None, 256 * KiB)
        assert 4 <= there.block_tokens <= 32
        before, after = (Layout.of(x, 256 * KiB) for x in (spec, there))
        assert there == spec or (after.slab_pages == 1 and after.waste <= GOOD_WASTE)
        assert there == spec or before.slab_pages > 1 or before.waste > GOOD_WASTE
