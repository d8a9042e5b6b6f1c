"""How a job is cut: everything is done once, within what its bucket has room for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast.core.errors import BrokenPromise
from ballast.kernels.gpu.attention_plan import SPLIT, AttentionShape, Bucket, plan, round_up

sequences = st.lists(
    st.tuples(st.integers(0, 1500), st.one_of(st.just(1), st.integers(1, 300))),
    min_size=1,
    max_size=9,
)
shapes = st.builds(
    lambda group, kv_heads, block_tokens: AttentionShape(group * kv_heads, kv_heads, block_tokens),
    st.sampled_from([1, 3, 4, 8, 33, 100]),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([1, 5, 16, 48]),
)


def tables_of(
    shape: AttentionShape, ragged: list[tuple[int, int]], more: int = 0
) -> list[list[int]]:
    sizes = [-(-(s + c) // shape.block_tokens) + more for s, c in ragged]
    order = np.random.default_rng(3).permutation(sum(sizes)).tolist()
    return [[order.pop() for _ in range(n)] for n in sizes]


@given(sequences, shapes, st.integers(0, 3))
def test_every_row_meets_every_key_once(
    ragged: list[tuple[int, int]], shape: AttentionShape, more: int
) -> None:
    starts, counts = [s for s, _ in ragged], [c for _, c in ragged]
    tables = tables_of(shape, ragged, more)
    made = plan(shape, starts, counts, tables)
    flat = [block for table in tables for block in table]
    assert made.tables.tolist() == flat
    begin = np.cumsum([0, *counts])
    met = {row: np.zeros(2000, int) for row in range(begin[-1])}
    partial: dict[int, tuple[int, int]] = {}
    for items, most in ((made.few, shape.few), (made.many, shape.tile)):
        for table, row, tokens, position, first, end, slot in items.tolist():
            i = int(np.searchsorted(begin, row, "right")) - 1
            assert flat[table : table + len(tables[i])] == tables[i]
            assert position == starts[i] + row - begin[i]
            assert 1 <= tokens <= most
            assert row + tokens <= begin[i + 1]
            assert 0 <= first < end <= starts[i] + counts[i]
            if slot >= 0:
                assert slot not in partial
                partial[slot] = (row, tokens)
            for r in range(row, row + tokens):
                met[r][first:end] += 1
    for i, (start, count) in enumerate(ragged):
        for j in range(count):
            row = int(begin[i]) + j
            assert (met[row][: start + j + 1] == 1).all()
            assert made.positions[row] == start + j
            block = tables[i][(start + j) // shape.block_tokens]
            place = block * shape.block_tokens + (start + j) % shape.block_tokens
            assert made.slots[row] == place
    merged = []
    for row, tokens, slot, slots in made.merges.tolist():
        assert slots > 1
        assert all(partial[s] == (row, tokens) for s in range(slot, slot + slots))
        merged += range(slot, slot + slots)
    assert merged == sorted(partial)


@given(sequences, shapes)
def test_a_bucket_has_room_for_what_its_jobs_are_cut_into(
    ragged: list[tuple[int, int]], shape: AttentionShape
) -> None:
    starts, counts = [s for s, _ in ragged], [c for _, c in ragged]
    tables = tables_of(shape, ragged)
    made = plan(shape, starts, counts, tables)
    bucket = Bucket.holding(counts, 1, sum(len(t) for t in tables))
    assert len(made.few) <= bucket.items(shape)
    assert len(made.many) <= bucket.tiles(shape)
    assert made.merges[:, 3].sum() <= bucket.items(shape)
    assert bucket.tokens >= sum(counts)


def test_where_a_decode_is_cut_depends_on_its_position_alone() -> None:
    shape = AttentionShape(8, 2, 16)
    alone = plan(shape, [600], [1], tables_of(shape, [(600, 1)]))
    ragged = [(10, 1), (600, 1), (3, 200), (2000, 1)]
    beside = plan(shape, [s for s, _ in ragged], [c for _, c in ragged], tables_of(shape, ragged))
    cuts = [(first, end) for _, row, *_, first, end, _ in beside.few.tolist() if row == 1]
    assert [tuple(i[4:6]) for i in alone.few.tolist()] == cuts
    assert cuts == [(0, SPLIT), (SPLIT, 2 * SPLIT), (2 * SPLIT, 601)]


@given(st.integers(1, 100_000), st.sampled_from([1, 16, 1024]))
def test_rounding_up_wastes_at_most_half(n: int, least: int) -> None:
    rounded = round_up(n, least)
    assert n <= rounded
    assert rounded <= max(least, 16) or rounded < 1.5 * n
    assert round_up(rounded, least) == rounded


def test_refuses_what_would_leave_its_blocks() -> None:
    shape = AttentionShape(2, 1, 16)
    for start, count in ((1, 16), (0, 0), (-1, 3)):
        with pytest.raises(BrokenPromise, match="do not fit into 1 blocks"):
            plan(shape, [0, start], [4, count], [[3], [5]])
    with pytest.raises(BrokenPromise):
        plan(shape, [], [], [])
