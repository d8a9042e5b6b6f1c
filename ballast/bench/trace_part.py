"""Take the part of a trace that a command line asks for: its models, start, seconds and rate.

Used by `bench.run_options`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from ballast.core.errors import ConfigError
from ballast.workload.servegen import ServeGenSample
from ballast.workload.traces import KINDS, SESSION_GAP, detect, load_trace
from ballast.workload.workload import Workload


@dataclass(frozen=True, slots=True)
class TracePart:
    """Options that select a part of a trace."""

    seconds: float
    rate: float | None = None
    """Requests per second in these seconds; None: as recorded."""
    start: float = 0.0
    """Seconds into the trace, as recorded."""
    seed: int = 0
    """Seed of requests that are drawn from client statistics (`servegen`)."""
    session_gap: float = SESSION_GAP
    """Seconds between the starts of two sessions, in traces with times relative to a session."""
    models: tuple[str, ...] | None = None
    """Models of the trace whose requests are kept; None: all."""

    def of(self, kind: str | None, file: Path) -> Workload:
        """Load the part. Raises ConfigError and WorkloadError."""
        kind = kind or detect(file)
        if kind == "servegen":
            drawn = ServeGenSample(
                start=self.start,
                seconds=self.seconds,
                rate=self.rate,
                models=self.models,
                seed=self.seed,
            )
            return load_trace(file, kind, servegen=drawn)
        trace = load_trace(file, kind, session_gap=self.session_gap)
        if self.models is not None:
            trace = trace.only_models(self.models)
        if self.start > trace.seconds:
            allowed = f"at most {trace.seconds:g}: there the trace ends"
            raise ConfigError("start", self.start, allowed)
        if self.start:
            trace = trace.window(self.start, math.nextafter(trace.seconds, math.inf))
        if self.rate is not None:
            return self._at_rate(trace, self.rate)
        part = trace.window(0.0, self.seconds)
        return part if trace.seconds >= self.seconds else _ends_early(part, trace.seconds)

    def _at_rate(self, trace: Workload, rate: float) -> Workload:
        """Return the first `rate * seconds` requests, their times rescaled to `seconds`."""
        requests, due = trace.requests, max(1, round(rate * self.seconds))
        if not trace.seconds:
            raise ConfigError("rate", rate, "none: all requests of the trace come at one moment")
        if len(requests) < due:
            part = trace.scale_rate(rate * trace.seconds / len(requests))
            return _ends_early(part, len(requests) / rate)
        first = requests[:due]
        end = next((r.at for r in requests[due:] if r.at > first[-1].at), None)
        if end is None:  # one mean gap later
            end = first[-1].at * (1 + 1 / due)
        return trace.first(due).scale_rate(end / self.seconds).window(0.0, self.seconds)


def _ends_early(part: Workload, seconds: float) -> Workload:
    """Note in its name that the trace ends before the part does."""
    return part.labelled(f"the trace ends after {seconds:.4g} s")


def named_trace(text: str) -> tuple[str | None, Path]:
    """Split `KIND:FILE` into a trace's kind and file; of a file alone the kind is None."""
    kind, colon, file = text.partition(":")
    if colon and kind in KINDS and not Path(text).is_file():
        return kind, Path(file)
    return None, Path(text)
