"""What a newcomer runs draws no dice; the gate does."""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import settings

ROOT = Path(__file__).parents[1]
LONG = "--hypothesis-profile long"


def test_make_test_tries_the_same_examples_each_time_and_make_check_others() -> None:
    fixed, long = settings.get_profile("fixed"), settings.get_profile("long")
    assert (fixed.derandomize, long.derandomize) == (True, False)
    assert fixed.database is None, "examples that an earlier run found are dice as well"
    assert long.max_examples > fixed.max_examples
    test = re.findall(r"^test:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert len(test) == 1
    assert "hypothesis" not in test[0]
    assert LONG in (ROOT / "scripts" / "check").read_text()


def test_the_profile_in_use_reaches_properties_with_settings_of_their_own() -> None:
    own = settings(max_examples=3)
    assert own.derandomize is settings.default.derandomize
