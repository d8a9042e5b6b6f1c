"""The child's side of a contest: load once, then answer runs asked for on standard input.

Only the standard library: it also runs in the environments of other engines. One JSON document a
line: ``{"prompts": [[id, ...], ...], "new_tokens": n}`` in; out comes ``{"ready": facts}`` once,
then per run ``{"begun": t, "times": [[t, ...], ...]}``, when each new token of each stream was
there, in seconds of the system's monotonic clock, or ``{"error": text}``.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

PR_SET_PDEATHSIG = 1
Prompts = list[list[int]]
Run = Callable[[Prompts, int], list[list[float]]]
"""(prompts, new tokens) -> times of each stream's tokens."""


def serve(load: Callable[[], tuple[Run, Mapping[str, Any]]]) -> None:
    """Load, then run what is asked until standard input ends.

    Whatever a library prints goes to standard error, out of the way of the answers. Ends with its
    parent, stopped or not.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def tell(document: Mapping[str, Any]) -> None:
        answers.write(json.dumps(document) + "\n")
        answers.flush()

    try:
        run, facts = load()
    except Exception as error:  # noqa: BLE001 - the parent reports it
        traceback.print_exc()
        tell({"error": f"{type(error).__name__}: {error}"})
        return
    tell({"ready": dict(facts)})
    for line in sys.stdin:
        asked = json.loads(line)
        begun = time.perf_counter()
        try:
            times = run(asked["prompts"], asked["new_tokens"])
        except Exception as error:  # noqa: BLE001 - the parent reports it
            traceback.print_exc()
            tell({"error": f"{type(error).__name__}: {error}"})
            return
        tell({"begun": begun, "times": times})
