"""What `c2c_sim` sets beside C2CServe's text."""

from __future__ import annotations

import pytest

from benchmarks.c2c_paper import PAPER_MULTIPROCESSORS
from benchmarks.c2c_sim import DENSE, MOE, figure_4b, layout, span, switches


def test_layouts_have_the_papers_multiprocessors_or_the_drivers() -> None:
    for slices, n in PAPER_MULTIPROCESSORS.items():
        (paper,), (driver,) = layout(slices, paper=True), layout(slices)
        assert [s.multiprocessors for s in paper.slices] == [n] * slices
        assert [s.memory for s in paper.slices] == [s.memory for s in driver.slices]


def test_the_link_side_of_figure_4b_is_the_papers() -> None:
    assert figure_4b()["link"] == pytest.approx([5.37, 0.134], rel=2e-3)


def test_a_switch_is_little_more_than_one_read_of_the_weights() -> None:
    found = switches(1, "c2cserve")
    assert list(found) == [*DENSE, *MOE]
    seconds = [found[name] or 0.0 for name in DENSE]
    for n_bytes, one in zip((6.4e9, 15.0e9, 139e9), seconds, strict=True):
        assert n_bytes / 427e9 < one < n_bytes / 427e9 + 0.02
    assert span({"a": 0.5, "b": None}, ("a", "b")) == "0.500-0.500 (does not fit: b)"
