"""Formulas of cost, in seconds. Coefficients are measured or come from a profile.

The job formula follows the forms that fit measured GPUs best (a floor for reading the weights,
linear terms in tokens and in KV read), extended to jobs that mix prefill chunks and decodes.
"""

from __future__ import annotations

from dataclasses import dataclass

from ballast.core.job import Job


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of one job: `base + T*per_token + B*per_sequence + C*per_context + S*per_pair`.

    T: prefill tokens; B: decoding sequences; C: KV tokens these read; S: query-key pairs of
    prefill attention. `base` holds the pass over the weights and the host's own work.
    """

    base: float
    per_token: float
    per_sequence: float
    per_context: float
    per_pair: float

    def features(self, job: Job) -> tuple[float, ...]:
        """(1, T, B, C, S) of a job, in the order of the coefficients."""
        return (
            1.0,
            float(job.prefill_tokens),
            float(job.decode_sequences),
            float(job.decode_context),
            float(job.prefill_pairs),
        )

    def seconds(self, job: Job) -> float:
        coefficients = (
            self.base,
            self.per_token,
            self.per_sequence,
            self.per_context,
            self.per_pair,
        )
        return sum(a * x for a, x in zip(coefficients, self.features(job), strict=True))

    def prefill_seconds(self, tokens: int, start: int = 0) -> float:
        """To compute `tokens` more positions of one sequence that has `start` of them."""
        pairs = tokens * start + tokens * (tokens + 1) // 2
        return self.base + tokens * self.per_token + pairs * self.per_pair


UNMEASURED = StepCosts(2e-3, 2e-4, 2e-4, 1e-8, 1e-9)
"""Stands in until a model has been measured; right to an order of magnitude on a small CPU."""


def copy_seconds(n_bytes: int, bytes_per_second: float) -> float:
    """Time of a copy alone on its link."""
    return n_bytes / bytes_per_second
