"""Sample prompt and output lengths, in tokens, for workloads that do not bring their own.

Used by the generators, the trace loaders and benchmarks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ballast.workload.workload import WorkloadError


class LengthSampler(Protocol):
    """Draws token counts, each 1 or more."""

    def sample(self, rng: np.random.Generator, n: int) -> NDArray[np.int64]: ...

    def __str__(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Constant:
    """The same count every time."""

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise WorkloadError(f"length: {self.tokens!r}: 1 or more")

    def sample(self, rng: np.random.Generator, n: int) -> NDArray[np.int64]:
        """(n,) times `tokens`; draws nothing."""
        return np.full(n, self.tokens, dtype=np.int64)

    def __str__(self) -> str:
        return f"constant {self.tokens}"


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Log-normal counts with median exp(mu), rounded and clipped to [1, most].

    Clipping lowers the mean: the moments are those of the distribution before it.
    """

    mu: float
    sigma: float
    most: int | None = None

    def __post_init__(self) -> None:
        if not self.sigma >= 0 or not np.isfinite(self.mu):
            raise WorkloadError(f"no log-normal lengths with mu {self.mu!r}, sigma {self.sigma!r}")

    @classmethod
    def of_median(cls, mean: float, median: float, most: int | None = None) -> LogNormal:
        """Return the distribution of this mean and median. Raises WorkloadError unless
        0 < median <= mean."""
        if not 0 < median <= mean:
            raise WorkloadError(f"no log-normal has mean {mean!r} and median {median!r}")
        return cls(log(median), sqrt(2 * log(mean / median)), most)

    @classmethod
    def of_cv(cls, mean: float, cv: float, most: int | None = None) -> LogNormal:
        """Return the distribution of this mean and coefficient of variation."""
        if not (mean > 0 and cv >= 0):
            raise WorkloadError(f"no log-normal has mean {mean!r} and CV {cv!r}")
        variance = log(1 + cv * cv)
        return cls(log(mean) - variance / 2, sqrt(variance), most)

    @property
    def mean(self) -> float:
        """Mean before clipping."""
        return exp(self.mu + self.sigma**2 / 2)

    def sample(self, rng: np.random.Generator, n: int) -> NDArray[np.int64]:
        """(n,) draws."""
        drawn = np.rint(rng.lognormal(self.mu, self.sigma, n))
        return np.clip(drawn, 1, self.most or 2**31).astype(np.int64)

    def __str__(self) -> str:
        most = "" if self.most is None else f", at most {self.most}"
        return f"log-normal, mean {self.mean:.4g}, median {exp(self.mu):.4g}{most}"


class Empirical:
    """Draws with replacement from given counts, by given weights (equal without)."""

    def __init__(self, tokens: Sequence[int], weights: Sequence[float] | None = None) -> None:
        self._tokens = np.asarray(tokens, dtype=np.int64)
        raw = np.ones(len(tokens)) if weights is None else np.asarray(weights, dtype=np.float64)
        if len(raw) != len(tokens) or not len(raw) or self._tokens.min() < 1:
            raise WorkloadError("empirical lengths need one weight per count, counts 1 or more")
        if not (np.isfinite(raw).all() and raw.min() >= 0 and raw.sum() > 0):
            raise WorkloadError("weights of lengths must be 0 or more, and not all 0")
        self._cumulative = np.cumsum(raw / raw.sum())

    @classmethod
    def of_pdf(cls, pdf: Mapping[int, float]) -> Empirical:
        """Return the distribution of {tokens: probability}, which need not add up to 1; counts of 0
        become 1."""
        ordered = sorted(pdf)
        return cls([max(1, t) for t in ordered], [pdf[t] for t in ordered])

    @property
    def mean(self) -> float:
        return float(self._tokens @ np.diff(self._cumulative, prepend=0.0))

    def sample(self, rng: np.random.Generator, n: int) -> NDArray[np.int64]:
        """(n,) draws."""
        places = np.searchsorted(self._cumulative, rng.random(n), side="right")
        return self._tokens[np.minimum(places, len(self._tokens) - 1)]

    def __str__(self) -> str:
        return f"empirical, {len(self._tokens)} values, mean {self.mean:.4g}"


CHAT_PROMPT = LogNormal.of_median(143, 43)
"""Prompts of Chatbot Arena as published with Prism: mean 143, median 43 tokens."""
CHAT_OUTPUT = LogNormal.of_median(239, 172)
"""Answers of Chatbot Arena: mean 239, median 172 tokens."""

SHAREGPT_PROMPT = LogNormal.of_median(208.0, 62.5, 1024)
"""ShareGPT-like prompts: as cut, mean 161, which vLLM published (SOSP '23, Figure 11); the shape of
Chatbot Arena's prompts, and the cut of vLLM's benchmarks."""
SHAREGPT_OUTPUT = LogNormal.of_median(361.0, 259.8, 1000)
"""ShareGPT-like answers: as cut, mean 338."""
ALPACA_PROMPT = LogNormal.of_cv(19.31, 0.6, 512)
"""Alpaca-like prompts: mean 19.3 (ibid.); their spread is assumed."""
ALPACA_OUTPUT = LogNormal.of_median(58.45, 42.07, 512)
"""Alpaca-like answers: mean 58.5, the shape of Chatbot Arena's."""
