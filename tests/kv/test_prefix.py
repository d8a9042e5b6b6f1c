"""Names of blocks: found again by equal tokens, salt and model, and by nothing else."""

import pytest

from ballast.core.errors import BrokenPromise
from ballast.kv.prefix import PrefixIndex

TOKENS = [7, 8, 9, 7, 8, 9, 1, 2]


def index_of(blocks: list[int], salt: str = "", fingerprint: str = "f") -> PrefixIndex:
    index = PrefixIndex(fingerprint, 2)
    index.name(TOKENS, blocks, len(blocks), salt)
    return index


def test_the_longest_prefix_is_found_but_never_the_last_token() -> None:
    index = index_of([5, 3, 8, 1])
    assert index.find([*TOKENS, 0], "") == [5, 3, 8, 1]
    assert index.find(TOKENS, "") == [5, 3, 8]
    assert index.find(TOKENS[:5], "") == [5, 3]
    assert index.find([*TOKENS[:4], 0, 0, 0], "") == [5, 3]
    assert index.find([0, *TOKENS], "") == []
    assert index.find([], "") == []


def test_equal_tokens_after_another_prefix_have_another_name() -> None:
    index = PrefixIndex("f", 2)
    index.name([1, 1, 5, 5], [0, 1], 2, "")
    assert index.find([5, 5, 0], "") == []
    assert index.find([2, 2, 5, 5, 0], "") == []


def test_salts_and_models_are_apart() -> None:
    assert index_of([0, 1], salt="tenant").find(TOKENS, "") == []
    assert index_of([0, 1], salt="tenant").find(TOKENS, "tenant") == [0, 1]
    a, b = PrefixIndex("ab", 2), PrefixIndex("a", 2)
    assert a._root("c") != b._root("bc")


def test_naming_continues_where_it_stopped() -> None:
    once, stepwise = index_of([5, 3, 8]), PrefixIndex("f", 2)
    for full in (0, 1, 1, 2, 3, 3):
        stepwise.name(TOKENS, [5, 3, 8], full, "")
    assert stepwise._names == once._names


def test_naming_again_hashes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    index = index_of([5, 3, 8])

    def fail(*_: object) -> bytes:
        raise AssertionError

    monkeypatch.setattr(index, "_next", fail)
    index.name(TOKENS, [5, 3, 8], 3, "")


def test_more_blocks_than_tokens_is_a_broken_promise() -> None:
    index = PrefixIndex("f", 2)
    with pytest.raises(BrokenPromise):
        index.name([1, 2, 3], [0, 1], 2, "")
    with pytest.raises(BrokenPromise):
        index.name([1, 2, 3, 4], [0], 2, "")


def test_the_first_of_two_equal_blocks_is_kept_and_the_second_takes_its_place() -> None:
    index = index_of([0, 1])
    index.name(TOKENS, [4, 5], 2, "")
    assert index.find(TOKENS, "") == [0, 1]
    assert not index.keep(4)
    index.forget(5)
    assert index.find(TOKENS, "") == [0, 1]
    index.forget(0)
    assert index.find(TOKENS, "") == []
    assert index.keep(4)
    assert index.find(TOKENS, "") == [4, 1]
    index.validate()


def test_a_name_follows_its_block() -> None:
    index = index_of([0, 1])
    index.move(1, 9)
    index.move(77, 78)
    assert index.find(TOKENS, "") == [0, 9]
    index.validate()


def test_only_what_is_computed_again_is_missed() -> None:
    index = PrefixIndex("m", 4)
    tokens, others = list(range(12)), list(range(100, 112))
    index.name(tokens, [0, 1, 2], 3, "")
    index.name(others, [3, 4, 5], 3, "")
    index.lose([1, 2, 3, 4, 5])
    for block in (1, 2, 3, 4, 5):
        index.forget(block)
    assert index.missed == 0
    index.name(tokens, [0, 7, 8], 3, "")
    assert index.missed == 2
    index.forget(8)  # not to make room
    index.name(tokens, [0, 7, 9], 3, "")
    assert index.missed == 2
