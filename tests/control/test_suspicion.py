"""Who is suspected of killing workers, and who is cleared."""

from __future__ import annotations

from ballast.control.suspicion import Suspicions


def test_two_crashes_make_a_suspect() -> None:
    suspicions = Suspicions()
    suspicions.crashed(["a", "b"])
    assert not suspicions.suspect("a")
    suspicions.crashed(["b", "c"])
    assert [i for i in "abc" if suspicions.suspect(i)] == ["b"]


def test_the_conviction_of_one_clears_its_companions_only() -> None:
    suspicions = Suspicions()
    suspicions.crashed(["poison", "a", "b"])
    suspicions.crashed(["poison", "a"])
    suspicions.crashed(["a", "b"])
    suspicions.convict("poison")
    assert not suspicions.suspect("a")
    suspicions.crashed(["b"])
    assert suspicions.suspect("b"), "the crash without the poison still counts"


def test_what_has_ended_is_forgotten() -> None:
    suspicions = Suspicions()
    for _ in range(2):
        suspicions.crashed(["a", "b"])
    suspicions.forget("a")
    assert not suspicions.suspect("a")
    assert suspicions.suspect("b")
