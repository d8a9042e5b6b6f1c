"""Requests go to the device that holds their prefix, unless it is busier than others."""

from __future__ import annotations

from dataclasses import replace

from ballast.core.settings import Role
from ballast.policy.fleet.fixed_placement import FixedPlacement
from ballast.policy.fleet.replica_choice import SLACK, Replica, for_decode, for_prefill, held_prefix


def test_a_held_prefix_attracts() -> None:
    assert held_prefix([Replica("x", 0), Replica("y", SLACK, 128)]) == "y"
    assert held_prefix([Replica("x", 0, 16), Replica("y", 2, 128)]) == "y"


def test_but_not_to_a_busy_device() -> None:
    assert held_prefix([Replica("x", 0), Replica("y", SLACK + 1, 128)]) == "x"


def test_a_prefix_that_is_little_of_the_prompt_attracts_only_of_equals() -> None:
    """As the system prompt that all of a model's requests begin with."""
    idle, holds = Replica("x", 0, prompt_tokens=12_000), Replica("y", 1, 512, prompt_tokens=12_000)
    assert held_prefix([idle, holds]) == "x"
    assert held_prefix([idle, replace(holds, open_requests=0)]) == "y"
    assert held_prefix([idle, replace(holds, cached_tokens=6_000)]) == "y"
    assert held_prefix([replace(idle, prompt_tokens=600), replace(holds, prompt_tokens=600)]) == "y"


def test_without_prefixes_the_fewest_open_requests() -> None:
    assert held_prefix([Replica("x", 3), Replica("y", 1), Replica("z", 1)]) == "y"


def test_roles_divide_requests_between_prefill_and_decode() -> None:
    first, both, last = (
        Replica("prefills", 0, role=Role.PREFILL),
        Replica("both", 0),
        Replica("decodes", 0, role=Role.DECODE),
    )
    assert for_prefill([first, both, last]) == [first, both]
    assert for_prefill([last]) == [last], "somebody has to"
    assert for_decode([first, both, last]) == [both, last]
    assert for_decode([first]) == []
    away = replace(last, resident=False)
    assert FixedPlacement().decodes([away, both]) == "both"
    assert FixedPlacement().decodes([away]) == "decodes"
