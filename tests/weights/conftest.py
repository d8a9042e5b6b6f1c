"""In all tests of weights, no change goes uncounted."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.engine.counted import count


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    count(monkeypatch, Counter())
