"""Stop strings: found wherever they are cut, and what is shown never has to be taken back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast.server.text.stop_strings import StopScanner


def scan(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    scanner = StopScanner(stops)
    shown = [scanner.push(piece) for piece in pieces]
    return "".join(shown) + scanner.flush(), scanner.matched


def by_character(stops: list[str], text: str) -> tuple[str, str | None]:
    """The definition: the first moment at which the text so far ends in a stop string."""
    for end in range(len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "matched"),
    [
        (["END"], ["a", "b"], "ab", None),
        (["END"], ["aEND", "b"], "a", "END"),
        (["END"], ["aE", "N", "Db"], "a", "END"),
        (["END"], ["aE", "N", "Eb"], "aENEb", None),
        (["END"], ["aEN"], "aEN", None),
        (["aab"], ["aaa", "b"], "a", "aab"),
        (["\n\n"], ["x\n", "\ny"], "x", "\n\n"),
        (["abcd", "bc"], ["abcd"], "a", "bc"),
        (["bc", "abc"], ["abc"], "", "abc"),
        (["日本"], ["今日", "本"], "今", "日本"),
        ([], ["a"], "a", None),
        (["a"], ["a"], "", "a"),
    ],
)
def test_examples(stops: list[str], pieces: list[str], shown: str, matched: str | None) -> None:
    assert scan(stops, pieces) == (shown, matched)


letters = st.text("abc", min_size=1, max_size=4)


@given(st.lists(letters, max_size=3), st.lists(st.text("abc", max_size=5), max_size=8))
def test_how_text_is_cut_does_not_matter(stops: list[str], pieces: list[str]) -> None:
    assert scan(stops, pieces) == by_character(stops, "".join(pieces))


@given(st.lists(letters, min_size=1, max_size=3), st.lists(st.text("abc", max_size=5), max_size=8))
def test_only_the_beginning_of_a_stop_string_is_held_back(
    stops: list[str], pieces: list[str]
) -> None:
    scanner = StopScanner(stops)
    shown = text = ""
    for piece in pieces:
        shown += scanner.push(piece)
        text += piece
        if scanner.matched is not None:
            break
        held = text[len(shown) :]
        assert text.startswith(shown)
        assert not held or any(s.startswith(held) and s != held for s in stops)
