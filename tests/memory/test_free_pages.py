"""Free pages by whether they have memory: what is popped first, and what a step keeps away."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from ballast.core.actions import Short
from ballast.core.errors import BrokenPromise
from ballast.memory.free_pages import FreePages
from ballast.memory.vm_null import NullVm


@pytest.fixture
def pages() -> FreePages:
    return FreePages(NullVm(4096, 8), 8, threading.Lock())


def all_free(n: int, but: tuple[int, ...] = ()) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    mask = np.ones(n, dtype=np.bool_)
    mask[list(but)] = False
    return mask


def test_pages_of_the_kind_asked_for_come_first(pages: FreePages) -> None:
    assert pages.populate_some(3) == 3
    bare = pages.pop(6, None, bare=True)
    assert bare is not None
    assert sum(map(bool, (pages.has_memory[page] for page in bare))) == 1
    pages.strip(bare)
    pages.add(bare)
    assert pages.populated == 2
    full = pages.pop(2, None, bare=False)
    assert full is not None
    assert all(pages.has_memory[page] for page in full)
    pages.validate(all_free(8, tuple(full)))
    with pytest.raises(BrokenPromise):
        pages.validate(all_free(8))


def test_pages_of_a_step_are_nowhere_until_it_ends(
    pages: FreePages, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[object] = []

    def populate(of: list[int]) -> Short | None:
        found.append(pages.pop(8, None, bare=False))
        return Short(len(of)) if len(found) > 1 else None

    monkeypatch.setattr(pages.vm, "populate", populate)
    assert pages.populate_some(2) == 2
    assert pages.populate_some(2) == Short(2)
    assert found == [None, None]
    assert pages.populated == 2
    pages.validate(all_free(8))
