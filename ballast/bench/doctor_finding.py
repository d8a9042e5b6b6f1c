"""Define `Finding`, one row of the table of `ballast doctor`: check, verdict, observation and cure.

Returned by all `doctor_*` modules.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Verdict(enum.Enum):
    OK = "ok"
    WARN = "warn"
    """Works, but slower or closer to a limit than it should."""
    FAIL = "fail"
    """Ballast, or the model named, cannot run like this."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the doctor's table."""

    check: str
    verdict: Verdict
    found: str
    cure: str = ""


def judged(check: str, found: str, cure: str, *, fail: bool = False, warn: bool = False) -> Finding:
    """`cure` is kept only where something is wrong."""
    verdict = Verdict.FAIL if fail else Verdict.WARN if warn else Verdict.OK
    return Finding(check, verdict, found, cure if verdict is not Verdict.OK else "")
