"""Block tables of models whose layers are in groups: what a window has passed goes."""

from __future__ import annotations

import random

import pytest

from ballast.core.actions import Short
from ballast.core.model import JobMemory, LayerKv, ModelSpec
from ballast.kv.blocks import KvCache
from ballast.kv.layout import fitted
from ballast.kv.windows import GONE, leave
from ballast.memory.pool import Pool
from ballast.memory.vm_null import NullVm
from ballast.weights.kv_groups import grouped

PAGE = 256
WINDOW = 5


def make(
    windows: tuple[int | None, ...] = (None, WINDOW, WINDOW), pages: int = 64
) -> tuple[KvCache, Pool]:
    """Blocks of 2 tokens, four to a page; three groups of one layer."""
    layers = tuple(LayerKv(i, 1, 4, group=i) for i in range(len(windows)))
    spec = ModelSpec(
        name="m",
        n_layers=len(windows),
        n_heads=1,
        kv_heads=1,
        head_dim=4,
        hidden=4,
        intermediate=4,
        vocab=1000,
        dtype="float32",
        max_model_len=512,
        block_tokens=2,
        segment_bytes=(1,),
        fingerprint="f",
        layer_kv=layers,
        kv_windows=windows,
        job_memory=JobMemory(step_tokens=8, step_logits=1, kept=0, freed=0),
    )
    pool = Pool(NullVm(PAGE, pages), pages)
    return KvCache(spec, pool, pool.vm), pool


def computed(kv: KvCache, tokens: list[int], chunk: int = 8) -> tuple[list[int], int]:
    """The table of a sequence whose tokens were computed in chunks, and the blocks it had most."""
    found = kv.admit(len(tokens), tokens)
    assert not isinstance(found, Short)
    table, done = found
    most = 0
    while done < len(tokens):
        end = min(len(tokens), done + chunk)
        assert kv.grow(table, end, done) is None
        seen = range(max(0, done + 1 - WINDOW) // 2, (end + 1) // 2)
        assert all(table[3 * step + group] != GONE for step in seen for group in range(3))
        most = max(most, sum(b != GONE for b in table))
        done = end
        kv.remember(tokens, table, done)
        kv.validate([table])
    return table, most


def test_a_long_sequence_keeps_its_windows_alone() -> None:
    kv, pool = make()
    tokens = random.Random(0).sample(range(1000), 160)
    table, most = computed(kv, tokens)
    assert len(table) == 3 * 80
    held = [sum(table[at] != GONE for at in range(group, len(table), 3)) for group in range(3)]
    assert held == [80, 2, 2]
    assert most <= kv.spec.blocks_of(160) < 3 * 80
    # What left is cached, so its pages can be had at once.
    kv.prefixes.drop(pool.total)
    assert kv.pages <= (sum(held) + 4) // 4 + 3
    kv.free(table)
    kv.validate([])


def test_a_prefix_is_found_as_far_as_its_windows_are_kept() -> None:
    kv, _ = make()
    tokens = random.Random(1).sample(range(1000), 40)
    table, _ = computed(kv, tokens)
    kv.free(table)
    found = kv.match([*tokens, 7])
    assert len(found) == 3 * 20
    assert [b != GONE for b in found[1::3]] == [False] * 18 + [True] * 2
    kv.free(found)
    shorter = kv.match([*tokens[:20], 7, 8, 9])
    assert len(shorter) == 3 * 10  # blocks that have left their window are cached
    kv.free(shorter)
    for block in [b for b in found[1::3] if b != GONE][-1:]:
        kv.book.prefix.forget(block)  # type: ignore[union-attr]
    assert len(kv.prefixes.find([*tokens, 7])) == 3 * 19


def test_a_short_pool_is_enough_for_a_long_prompt() -> None:
    """Of three groups two have a window: the prompt takes little more than a third."""
    kv, pool = make(pages=30)
    tokens = random.Random(2).sample(range(1000), 180)
    assert kv.spec.blocks_of(180) <= 30 * 4 < 3 * 90
    table, _ = computed(kv, tokens)
    kv.free(table)
    assert pool.total == 30


def test_all_groups_have_windows() -> None:
    kv, _ = make((WINDOW, WINDOW, WINDOW), pages=8)
    tokens = random.Random(3).sample(range(1000), 300)
    table, _ = computed(kv, tokens)
    kv.free(table)
    assert len(kv.match([*tokens, 1])) == 3 * 150


@pytest.mark.parametrize("layers", [6, 13, 26, 34, 48, 62])
def test_layers_are_divided_with_little_waste(layers: int) -> None:
    """Every sixth layer sees all, as in Gemma 3."""
    kept = [LayerKv(i, 2, 8) for i in range(layers)]
    windows = {i: None if i % 6 == 5 else 1024 for i in range(layers)}
    found = grouped(kept, windows)
    assert found is not None
    placed, of_groups = found
    sizes = [sum(kv.group == g for kv in placed) for g in range(len(of_groups))]
    assert 1 - layers / (len(sizes) * max(sizes)) <= 0.15
    assert all(of_groups[kv.group] == windows[kv.layer] for kv in placed)


def test_readers_lie_with_their_source() -> None:
    kept = [LayerKv(0, 1, 8), LayerKv(1, 1, 8), LayerKv(2, 1, 8, source=1)]
    found = grouped(kept, {0: None, 1: 16, 2: 16})
    assert found is not None
    assert [kv.group for kv in found[0]] == [0, 1, 1]
    assert grouped(kept, {0: None, 1: 16, 2: None}) is None
    assert grouped(kept[:1], {0: None}) is None


def test_sizes() -> None:
    kv, _ = make()
    spec = kv.spec
    assert spec.token_bytes == 3 * 2 * 4 * 4
    assert spec.block_bytes == 2 * 2 * 4 * 4
    assert spec.tokens_in(spec.blocks_of(100)) >= 100
    assert fitted(spec, None, PAGE).block_tokens > 2
    table = list(range(3 * 10))
    assert leave(spec, table, 20) == [*range(22, 0, -3), *range(23, 1, -3)]
