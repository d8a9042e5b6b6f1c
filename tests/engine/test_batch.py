"""Requests that run, wait or are paused: each method does what it says, and counts its change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from ballast.core.request import Request, Submission
from ballast.engine.batch import Batch, Paused
from ballast.engine.waiting import Waiting
from tests.engine.counted import count
from tests.policy import worlds


def request(sequence: int, arrival: float = 0.0) -> Request:
    submission = Submission(
        id=f"r{sequence}", model="m", prompt=(1, 2), max_tokens=4, arrival=arrival
    )
    return Request.of(submission, sequence, worlds.spec())


def test_every_change_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()
    count(monkeypatch, calls)
    batch, waiting, paused = Batch(), Waiting(), Paused()
    second, first = request(2, 1.0), request(1)
    batch.add(second)
    batch.add(first)
    assert list(batch) == [first, second] == batch[:]
    assert (batch[0], len(batch), batch.leaving) == (first, 2, [])
    batch.begin([first, second])
    assert first.in_flight
    batch.leave(first)
    batch.leave(first)
    assert batch.leaving == [first]
    batch.end([first, second])
    assert not second.in_flight
    batch.compute(first, 2)
    batch.extend(first, 7, 1.5)
    assert (first.computed, first.tokens) == (2, [1, 2, 7])
    assert first.first_token_at == first.last_at == 1.5
    assert batch.take_leaving() == [first]
    assert batch.leaving == []
    batch.remove(first)
    paused.add(first)
    assert (list(paused), paused["r1"], len(paused)) == (["r1"], first, 1)
    paused.remove(first)
    waiting.add(first)
    waiting.remove(first)
    waiting.add(first)
    waiting.admit(first)
    assert [*batch, *paused, *waiting] == [second]
    methods = ("add", "begin", "leave", "end", "compute", "extend", "take_leaving", "remove")
    assert set(calls) == {
        *(f"Batch.{name}" for name in methods),
        *(f"{owner}.{name}" for owner in ("Paused", "Waiting") for name in ("add", "remove")),
        "Waiting.admit",
    }


def test_what_a_policy_is_asked_about_is_news() -> None:
    batch, waiting, paused, r = Batch(), Waiting(), Paused(), request(1)

    def news(what: Callable[[], object]) -> bool:
        parts = (batch, waiting, paused)
        before = [part.news.n for part in parts]
        what()
        return before != [part.news.n for part in parts]

    assert news(lambda: waiting.add(r))
    assert not news(lambda: waiting.admit(r))
    assert not news(lambda: batch.add(r))
    assert not news(lambda: batch.begin([r]))
    assert not news(lambda: batch.end([r]))
    assert not news(lambda: batch.compute(r, 2))
    assert not news(lambda: batch.extend(r, 7, 1.0))
    assert not news(lambda: batch.leave(r))
    assert not news(batch.take_leaving)
    assert news(lambda: batch.remove(r))
    assert news(lambda: paused.add(r))
    assert news(lambda: paused.remove(r))
    waiting.add(r)
    assert news(lambda: waiting.remove(r))


def test_who_is_not_there_cannot_go() -> None:
    with pytest.raises(ValueError, match="not in list"):
        Batch().remove(request(1))
    with pytest.raises(KeyError):
        Paused().remove(request(1))
