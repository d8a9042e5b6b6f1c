"""Compute how fairly models share KV memory: MuxServe (Duan et al., 2024), Equation 2, as measured.

R of that equation, the blocks of KV that a model uses, normalised by its request rate and the size
of its requests, is in seconds here: mean bytes of KV held, over the bytes of KV per second that the
model's requests amount to. A model whose requests wait for memory has a lower value than others.
Used by benchmarks.
"""

from __future__ import annotations

from collections.abc import Mapping

from ballast.bench.report import Report


def normalised_kv(report: Report, kv_bytes_per_token: Mapping[str, int]) -> dict[str, float]:
    """Return by model, of those with requests, seconds: mean bytes of KV that its requests held
    while the run lasted, over requests per second x tokens of a request x bytes of KV per token.

    `kv_bytes_per_token`: of each model. Cached prefixes without a request do not count. Memory is
    as sampled; without samples there is no answer.
    """
    if not report.memory:
        return {}
    tokens_of: dict[str, int] = {}
    for r in report.records:
        tokens_of[r.model] = tokens_of.get(r.model, 0) + r.prompt_tokens + r.output_tokens
    found = {}
    for model, tokens in tokens_of.items():
        held = sum(s.owners.get(f"kv:{model}", 0) for s in report.memory) / len(report.memory)
        rate = tokens * kv_bytes_per_token[model] / report.wall_seconds
        found[model] = held / rate
    return found


def fairness_gap(report: Report, kv_bytes_per_token: Mapping[str, int]) -> float | None:
    """Return Equation 2's epsilon, the greatest difference between two models' `normalised_kv`,
    relative to the mean over models: 0 is perfectly fair. None where fewer than two models had
    requests, or no KV was seen."""
    found = normalised_kv(report, kv_bytes_per_token)
    if len(found) < 2 or not any(found.values()):
        return None
    return (max(found.values()) - min(found.values())) * len(found) / sum(found.values())
