"""What the benchmark of prices compares, and what it makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ballast.policy.presets import option_names, resolve
from benchmarks.prices import (
    BLOCK,
    COMPARED,
    MODELS,
    PRESETS,
    PRICED,
    Result,
    arrivals,
    documents,
    points,
    specs,
    table,
)

NOWHERE = Path("no such trace")


def test_rows_differ_in_prices_alone() -> None:
    for preset in PRESETS:
        assert "by_price" in option_names(preset)
        fixed, priced = (
            resolve(COMPARED.rows[row].preset, COMPARED.options(row)).values
            for row in (preset, PRICED.format(preset))
        )
        assert {k for k in fixed if fixed[k] != priced[k]} == {"by_price"}


@pytest.mark.parametrize("workload", MODELS)
def test_a_workload_has_its_rate_and_its_models(workload: str) -> None:
    for rate in (2.0, 8.0):
        work = arrivals(workload, rate, NOWHERE, seconds=60.0)
        assert len(work.requests) == pytest.approx(60 * rate, rel=0.35)
        assert {r.model for r in work.requests} <= {s.name for s in specs(workload)}
        assert work == arrivals(workload, rate, NOWHERE, seconds=60.0)


def test_prompts_begin_with_documents_that_others_begin_with() -> None:
    work = documents(MODELS["prefixes"], 4.0, 60.0)
    begins = [r.prefix_blocks for r in work.requests]
    assert len(set(begins)) < 0.5 * len(begins)
    models: dict[int, str] = {}
    for r in work.requests:
        assert r.prefix_blocks
        assert 64 <= r.prompt_tokens - len(r.prefix_blocks) * BLOCK <= 512
        assert models.setdefault(r.prefix_blocks[0], r.model) == r.model


def test_points_are_what_prices_add() -> None:
    rows = {
        row: {1.0: Result(0.9 if row == PRICED.format("mirage") else 0.8, 0.5, 2.0, 10, 0, 0)}
        for row in COMPARED.rows
    }
    gained = points(rows)
    assert {p: by[1.0] for p, by in gained.items()} == pytest.approx(
        {"balloon": 0.0, "recompute": 0.0, "mirage": 10.0, "kvswap": 0.0}
    )
    assert "| `mirage by price` | 90 (0.50, 2.0) |" in table(rows)
