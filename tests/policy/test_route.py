"""Requests go to the device that holds their prefix, unless it is busier than others."""

from __future__ import annotations

from ballast.policy.route import SLACK, Replica, held_prefix


def test_a_held_prefix_attracts() -> None:
    assert held_prefix([Replica("x", 0), Replica("y", SLACK, 128)]) == "y"
    assert held_prefix([Replica("x", 0, 16), Replica("y", 2, 128)]) == "y"


def test_but_not_to_a_busy_device() -> None:
    assert held_prefix([Replica("x", 0), Replica("y", SLACK + 1, 128)]) == "x"


def test_without_prefixes_the_fewest_open_requests() -> None:
    assert held_prefix([Replica("x", 3), Replica("y", 1), Replica("z", 1)]) == "y"
