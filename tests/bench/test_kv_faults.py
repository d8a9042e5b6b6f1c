"""Each kind of KV, moved to another device and after a crash of its worker: no token changes."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.kv_kinds import KINDS, ROUNDED, SHARED, faulty
from benchmarks.kv_moves import FAULTS, STREAMS, TOKENS

pytestmark = pytest.mark.slow

WINDOWS = ("windows and all", "windows alone", SHARED)
"""Kinds whose requests move without their KV: what has left a window is not there."""
Found = dict[str, dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return faulty(tmp_path_factory.mktemp("kinds"), "auto", [*KINDS])


@pytest.mark.parametrize("kind", [*KINDS, ROUNDED])
@pytest.mark.parametrize("fault", FAULTS)
def test_no_token_changes(fault: str, kind: str, found: Found) -> None:
    verdict = found[fault][kind]
    assert verdict["met"] > 0
    assert (verdict["with_kv"] > 0) == (fault == "moved" and kind not in WINDOWS)
    assert verdict["tokens"] == STREAMS * TOKENS
    assert verdict["wrong"] == 0
    assert verdict["ok"], verdict
