"""SwiftCache's arithmetic by its worked examples, and Algorithm 1 as published."""

from __future__ import annotations

import pytest

from ballast.policy.fleet.elastic_cache import (
    ElasticUnits,
    block_elements,
    elastic_units,
    scale_down,
    scale_up,
)

# Table 2: layers, KV heads, head dimension. (LWM is a 7B model there, and LWM-14B in 3.4.)
MODELS = {"LWM": (32, 32, 128), "8B": (36, 8, 128), "14B": (40, 8, 128), "32B": (64, 8, 128)}


@pytest.mark.parametrize(
    ("master", "worker", "units"),
    [
        ("LWM", "14B", (5, 16)),
        ("LWM", "32B", (1, 2)),
        ("LWM", "8B", (9, 32)),
        ("32B", "14B", (5, 8)),
    ],
)
def test_units_of_the_papers_models_at_one_block_size(
    master: str, worker: str, units: tuple[int, int]
) -> None:
    elements = [
        block_elements(n, 16, heads, dim) for n, heads, dim in map(MODELS.get, (master, worker))
    ]  # type: ignore[misc]
    found = elastic_units(*elements)
    assert (found.master, found.worker) == units
    assert found.master * elements[0] == found.worker * elements[1]


def test_algorithm_1_rounds_up_when_a_worker_takes_back_and_down_when_it_gives() -> None:
    units = ElasticUnits(master=5, worker=16)
    assert scale_up(10, 16, units, 160) == (0, 0)
    assert scale_up(10, 16, units, 161) == (16, 5)
    assert scale_up(10, 16, units, 16 * 27) == (32, 10)
    assert scale_down(10, 16, units, [160, 3]) == (0, 0)
    assert scale_down(42, 16, units, [160]) == (32, 10)
    assert scale_down(41, 16, units, [160]) == (16, 5)
    assert scale_down(41, 16, units, []) == (32, 10)
