"""What MIRAGE's text says in 7.2 to 7.6, number by number, as ratios to compare with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """One number."""

    section: str
    text: str
    """Shortened."""
    group: str
    """The group of `mirage_cases` that it is compared with."""
    metric: str
    """A key of `mirage_run.Measured.summary`."""
    of: str
    over: str
    """The metric of row `of` over that of `over`."""
    stated: float
    setting: str | None = None
    """One of the group's, where the text speaks of one; None: their mean."""
    sharing: str = "pool"


METRICS = "throughput", "p99_ttft", "p99_tbt"


def _against_vllm(
    section: str, text: str, group: str, throughput: float, tbt: float, ttft: float
) -> tuple[Claim, ...]:
    """Changes in per cent that the text gives as averages over what it compares."""
    stated = dict(zip(METRICS, (throughput, ttft, tbt), strict=True))
    return tuple(
        Claim(section, text, group, metric, "mirage", "recompute", 1 + change / 100)
        for metric, change in stated.items()
    )


CLAIMS = (
    *_against_vllm("7.2, Fig. 8", "C1, in turns", "temporal_c1", 39.9, -54.4, -96.7),
    *_against_vllm("7.2, Fig. 8", "C2, in turns", "temporal_c2", 45.3, -44.8, -74.8),
    *_against_vllm("7.2, Fig. 9", "C2, rates 3:1 and 1:3", "rates_c2", 86.7, -82.5, -99.3),
    *_against_vllm("7.2, Fig. 10", "C2, long and short inputs", "inputs_c2", 65.6, -57.1, -98.1),
    *_against_vllm("7.3, Fig. 12", "C1, side by side", "mps_c1", 6.6, -65.5, -20.7),
    *_against_vllm("7.3, Fig. 13", "C1, sliced", "mig_c1", 7.9, -57.4, -34.8),
    Claim(
        "7.2, Fig. 11",
        "C1: MRU in place of LRU, tail TBT, up to",
        "temporal_c1",
        "p99_tbt",
        "mirage",
        "lru",
        0.78,
        sharing="shares",
    ),
    Claim(
        "7.2, Fig. 11",
        "C1: MRU in place of LRU, tail TTFT, up to",
        "temporal_c1",
        "p99_ttft",
        "mirage",
        "lru",
        0.78,
        sharing="shares",
    ),
    *(
        Claim(
            "7.4, Fig. 14", f"OPT-13b, {text}", "alone", metric, "mirage", "kvswap", ratio, "Alpaca"
        )
        for text, metric, ratio in (
            ("throughput over Pie's", "throughput", 1.471),
            ("P99 TTFT", "p99_ttft", 0.064),
            ("P99 TBT (alike)", "p99_tbt", 1.0),
        )
    ),
    Claim(
        "7.5, Fig. 15",
        'one slot always in place of two: throughput ("can result in")',
        "alone",
        "throughput",
        "beta1",
        "beta2",
        0.873,
        "Alpaca",
    ),
    Claim(
        "7.6.1, Fig. 16",
        "reversion, at 1 request/s after a peak of 10: P50 TBT",
        "reversion",
        "p50_tbt",
        "mirage",
        "kept",
        0.51,
        "Alpaca",
    ),
    Claim(
        "7.6.1, Fig. 16",
        "the same, over neither reversion nor cap",
        "reversion",
        "p50_tbt",
        "mirage",
        "kept_uncapped",
        0.51,
        "Alpaca",
    ),
    Claim(
        "7.6.2, Fig. 17",
        "capped over aggressive, at 10 requests/s: P99 TBT",
        "alone",
        "p99_tbt",
        "mirage",
        "uncapped",
        0.42,
        "Alpaca",
    ),
    Claim(
        "7.6.2, Fig. 17",
        "the same, P50 TBT",
        "alone",
        "p50_tbt",
        "mirage",
        "uncapped",
        0.56,
        "Alpaca",
    ),
)
