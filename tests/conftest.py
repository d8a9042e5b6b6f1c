"""Processes that tests start run the checkout that the tests are from, whichever is installed; and
no example of a property fails for the time that it took on a busy machine.

Properties are tried with the same examples each time, so that a run says something of the code and
not of the dice. `--hypothesis-profile long` (`make check`) draws others, and many more; what it
finds is kept as an `@example`.

`BALLAST_TEST_SPEED=20` runs the tests as on a machine twenty times as fast: the clock of devices in
the tests' own process goes as much slower. `scripts/test_everywhere` uses it.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from ballast.core.event import Event
from ballast.live.inbox import MonotonicClock, QueueInbox
from tests.poison import poison_freed_kv
from tests.remembered import remember_inspections

# Until all tests are collected, nothing of what is imported becomes garbage.
gc.disable()

LONG_EXAMPLES = 1000
"""Examples of each property that has no number of its own, in the profile `long`."""
FIXED_EXAMPLES = 30
"""The same examples each time say little more by being many."""
settings.register_profile(
    "fixed",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
    max_examples=FIXED_EXAMPLES,
)
settings.register_profile(
    "long", settings.get_profile("fixed"), derandomize=False, max_examples=LONG_EXAMPLES
)
# pytest's --hypothesis-profile loads another one later.
settings.load_profile("fixed")

os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
)

# Tests start some hundred processes: that each compiles the whole package anew, as this variable of
# some shells and images has it, doubles what a start costs.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# The same kernels on every machine, whatever else it does; and no file of the user's.
os.environ["BALLAST_CHOICES"] = ""
_FINDINGS = tempfile.TemporaryDirectory(prefix="ballast-findings-")
os.environ["BALLAST_FINDINGS"] = _FINDINGS.name

_NEVER = 1e9
"""Seconds; beyond ten times as many a wait cannot last."""
SPEED = float(os.environ.get("BALLAST_TEST_SPEED", "1"))


def _seem_faster(times: float) -> None:
    """Have clocks of devices go slower by this factor, and what waits by them wait longer."""
    take = QueueInbox.take

    def now(clock: MonotonicClock) -> float:
        return (time.perf_counter() - clock._origin) / times

    def take_later(inbox: QueueInbox, until: float | None) -> list[Event]:
        if until is not None:
            until = min(_NEVER, until + (until - inbox._clock.now()) * (times - 1.0))
        return take(inbox, until)

    MonotonicClock.now = now  # type: ignore[method-assign]
    QueueInbox.take = take_later  # type: ignore[method-assign]


if SPEED != 1.0:
    _seem_faster(SPEED)

poison_freed_kv()
remember_inspections()

LONGEST = "server", "cluster", "bench"
"""Folders whose files take longest, beside the files in none."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest comes first, so that no process of several is left alone with it."""
    tests = Path(__file__).parent

    def is_short(item: pytest.Item) -> bool:
        folder, *inside = item.path.relative_to(tests).parts
        return bool(inside) and folder not in LONGEST

    items.sort(key=is_short)


def pytest_collection_finish() -> None:
    """What has been imported and collected stays: a full collection, which some tests ask for and
    others bring about, would take a second to look through it."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Libraries that count what they have at the end find it collected."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def levels_of_logs() -> Iterator[None]:
    """What a server in the tests' own process makes of the log's level ends with the test."""
    level = logging.getLogger("ballast").level
    yield
    logging.getLogger("ballast").setLevel(level)
