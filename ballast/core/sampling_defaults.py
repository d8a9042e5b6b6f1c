"""Define the sampling parameters of requests that name none.

They come from a checkpoint's `generation_config.json` and, before it, from the fleet file.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Values for what a request leaves open; None: not set, the API's own default counts."""

    temperature: float | None = None
    """0: greedy."""
    top_p: float | None = None
    top_k: int | None = None
    """0, -1: all."""
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    """Bound of the output in tokens."""

    def over(self, others: SamplingDefaults) -> SamplingDefaults:
        """Return these values, and `others`' where one is not set here."""
        both = {f.name: (getattr(self, f.name), getattr(others, f.name)) for f in fields(self)}
        return SamplingDefaults(**{n: b if a is None else a for n, (a, b) in both.items()})
