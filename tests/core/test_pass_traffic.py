"""What a pass reads in host memory: all matrices once, experts as far as rows choose them."""

from __future__ import annotations

import random

import pytest

from ballast.core.gemm_traffic import GemmShape, hybrid
from ballast.core.pass_traffic import OS_TILE, TOGETHER, WS_TILE, PassSizes, pass_traffic
from ballast.sim.model_catalogue import facts

HOPPER = 132


def sizes(name: str) -> PassSizes:
    return PassSizes.of(facts(name).spec(max_model_len=4096))


@pytest.mark.parametrize("name", ["Llama-3.2-3b", "Llama-3-8b", "Llama-3-70b", "Qwen3-8b"])
def test_a_dense_model_is_read_once_by_a_pass_that_spares_the_link(name: str) -> None:
    facts_of = facts(name)
    read = 2 * (facts_of.layer_parameters + facts_of.embedding)
    for rows in (1, 100, 2048):
        found = pass_traffic(sizes(name), rows, 1, 0.0, HOPPER)
        assert found.link == pytest.approx(read, rel=2e-3)  # norms and biases are no matrices
    assert pass_traffic(sizes(name), 2048, 1, 1.0, HOPPER).link > 10 * read


def test_the_share_trades_the_link_for_device_memory() -> None:
    found = [pass_traffic(sizes("Llama-3-8b"), 2048, 1, s, 16) for s in (0.0, 0.25, 0.5, 1.0)]
    assert [t.link for t in found] == sorted(t.link for t in found)
    assert found[3].device < found[0].device / 2


def test_one_tile_of_rows_has_no_partial_sums_whatever_the_share() -> None:
    of = sizes("Llama-3-8b")
    assert pass_traffic(of, 128, 1, 0.0, 16) == pass_traffic(of, 128, 1, 1.0, 16)
    assert pass_traffic(of, 128, 1, 0.0, 16).sums == 0 < pass_traffic(of, 129, 1, 0.0, 16).sums


def test_output_stationary_traffic_on_a_whole_device_is_near_figure_4b() -> None:
    figure_4b = GemmShape(m=5120, n=8192, k=8192)
    found = hybrid(figure_4b, OS_TILE, WS_TILE, 1.0, HOPPER, TOGETHER)
    assert found.device == pytest.approx(1.23e9, rel=0.2)


@pytest.mark.parametrize(("name", "experts"), [("Mixtral-8x7B", 8), ("Qwen3-30B-A3B", 128)])
def test_experts_that_no_row_has_chosen_are_not_read(name: str, experts: int) -> None:
    found = sizes(name)
    assert (found.experts, found.read_experts(0)) == (experts, 0.0)
    assert found.read_experts(1) == pytest.approx(found.chosen)
    rng = random.Random(0)
    for rows in (4, 30):
        drawn = [
            len({e for _ in range(rows) for e in rng.sample(range(experts), found.chosen)})
            for _ in range(300)
        ]
        assert found.read_experts(rows) == pytest.approx(sum(drawn) / 300, rel=0.03)
    one, many = (pass_traffic(found, rows, 1, 0.0, HOPPER).link for rows in (1, 2048))
    active = facts(name).active_parameters / facts(name).parameters
    assert one / many == pytest.approx(active, rel=0.1)
