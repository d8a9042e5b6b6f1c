"""What `c2c_sim` sets beside C2CServe's text."""

from __future__ import annotations

import pytest

from benchmarks.c2c_devices import DISK, reading, superchips
from benchmarks.c2c_paper import PAPER_MULTIPROCESSORS
from benchmarks.c2c_passes import bounds, figure_4a, figure_4b
from benchmarks.c2c_sim import (
    DENSE,
    MOE,
    cold_starts,
    layout,
    models,
    over,
    span,
    switches,
)


def test_layouts_have_the_papers_multiprocessors_or_the_drivers() -> None:
    for slices, n in PAPER_MULTIPROCESSORS.items():
        (paper,), (driver,) = layout(slices, paper=True), layout(slices)
        assert [s.multiprocessors for s in paper.slices] == [n] * slices
        assert [s.memory for s in paper.slices] == [s.memory for s in driver.slices]


def test_the_link_side_of_figure_4b_is_the_papers() -> None:
    assert figure_4b()["link"] == pytest.approx([5.37, 0.134], rel=2e-3)


def test_the_order_of_figure_4a_is_the_papers() -> None:
    found = figure_4a({f"{n}": layout(n, paper=True)[0] for n in (1, 3, 7)})
    ratios = {n: last / first for n, (first, last) in found.items()}
    assert ratios["1"] < 0.4 < 0.8 < ratios["3"] < 1.4 < 2.0 < ratios["7"]


def test_the_best_share_of_a_pass_follows_the_part_of_the_link_that_it_has() -> None:
    (spec,) = models(DENSE[1:2], (1,))
    alone, contended = (bounds(layout(7, paper=True)[0], spec, part)[-1] for part in (1.0, 1 / 7))
    assert 1 > alone["best_share"] > contended["best_share"] > 0
    for row in (alone, contended):
        assert row["compute"] <= row["best"] <= min(row["knob_0"], row["knob_1"])


def test_a_switch_is_little_more_than_one_read_of_the_weights() -> None:
    found = switches(1, "c2cserve")
    assert list(found) == [*DENSE, *MOE]
    seconds = [found[name] or 0.0 for name in DENSE]
    for n_bytes, one in zip((6.4e9, 15.0e9, 139e9), seconds, strict=True):
        assert n_bytes / 427e9 < one < n_bytes / 427e9 + 0.02
    assert span({"a": 0.5, "b": None}, ("a", "b")) == "0.500-0.500 (does not fit: b)"


def test_superchips_read_over_their_links_as_fast_as_these_are() -> None:
    found = {
        name: reading(kind, models(["Llama-3-8b"], [1])[0]) for name, kind in superchips().items()
    }
    steps = [of["tpot_in_place"] for of in found.values()]
    assert steps[0] == pytest.approx(15.0e9 / 427e9, rel=0.02)
    assert steps[1] == pytest.approx(steps[0], rel=0.02), "GB200's link is GH200's"
    assert steps[2] == pytest.approx(steps[0] / 2, rel=0.02), "Rubin's is twice that"
    resident = [of["tpot_resident"] for of in found.values()]
    assert resident == sorted(resident, reverse=True)
    assert cold_starts({"Llama-3-8b": 0.1, "Llama-3-70b": None}) == {
        "Llama-3-8b": pytest.approx(16.06e9 / DISK + 0.1, rel=0.01),
        "Llama-3-70b": None,
    }
    assert over({"a": 3.0, "b": None}, {"a": 2.0, "b": 1.0}) == "1.50-1.50"
