"""What counts as hurt by an attack: what the attack saw, and what a client beside it did."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from benchmarks import robustness
from benchmarks.robustness import ATTACKS, GAP_SECONDS, LIVE_SECONDS, Attack, attempt
from benchmarks.robustness_target import Target
from benchmarks.witness import Seen, Witness, WitnessProcess

UNHURT = Seen(live=LIVE_SECONDS, gap=GAP_SECONDS, probes=1, tokens=1)


class Noticing:
    """A witness of whatever it is given."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen

    def begin(self) -> None:
        pass

    def end(self) -> Seen:
        return self._seen


def held(_: Target) -> str:
    return "refused"


def missed(_: Target) -> str:
    raise AssertionError("answered")


def broken(_: Target) -> str:
    raise ConnectionResetError("gone")


def tried(attack: Attack, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> tuple[bool, str]:
    monkeypatch.setattr(robustness, "AFTER_SECONDS", 0.0)
    target = Target("http://127.0.0.1:1", os.getpid(), Path())
    result = attempt(attack, target, cast(WitnessProcess, Noticing(seen)))
    return result["ok"], result["seen"]


def test_an_attack_that_nobody_notices_is_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tried(Attack("a", "refused", held), UNHURT, monkeypatch) == (True, "refused")


@pytest.mark.parametrize(("run", "seen"), [(missed, "answered"), (broken, "ConnectionReset")])
def test_what_is_not_as_expected_fails(
    run: Callable[[Target], str], seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ok, found = tried(Attack("a", "refused", run), UNHURT, monkeypatch)
    assert not ok
    assert found.startswith(seen)


@pytest.mark.parametrize(
    "seen",
    [
        Seen(live=LIVE_SECONDS + 0.01, gap=0.0, probes=1, tokens=1),
        Seen(live=0.0, gap=GAP_SECONDS + 0.01, probes=1, tokens=1),
        Seen(probes=1, tokens=0),
        Seen(probes=0, tokens=1),
        Seen(probes=1, tokens=1, errors=["_stream: 503"]),
    ],
    ids=["/live is late", "a gap", "no token", "no probe", "an error"],
)
def test_what_others_notice_fails_it(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not tried(Attack("a", "refused", held), seen, monkeypatch)[0]


def test_a_gap_that_has_not_ended_counts() -> None:
    now = [0.0]
    witness = Witness("http://127.0.0.1:1", "", "m", lambda: now[0])
    noted: list[Seen] = []

    def lines() -> Iterator[bytes]:
        yield b"data: {}\n"
        now[0] = 2.0
        yield b"data: {}\n"
        now[0] = 7.0
        noted.append(Seen(**vars(witness.end())))
        witness.begin()
        now[0] = 8.0
        yield b"data: {}\n"
        yield b"data: [DONE]\n"

    witness.read(lines())
    assert (noted[0].gap, noted[0].tokens) == (5.0, 2)
    now[0] = 100.0  # between two streams there is no gap
    assert (witness.end().gap, witness.end().tokens) == (6.0, 1)


def test_attacks_have_names_of_their_own() -> None:
    names = [attack.name for attack in ATTACKS]
    assert len(names) == len(set(names))
