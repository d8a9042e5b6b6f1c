"""What MIRAGE's text says in 7.2 to 7.6, number by number, as ratios to compare with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """One number."""

    section: str
    says: str
    """Shortened."""
    group: str
    """Of `mirage_sim`, whose ratios it is compared with."""
    metric: str
    """A key of `mirage_setting.Measured.summary`."""
    of: str
    over: str
    """The metric of variant `of` over that of `over`."""
    stated: float
    setting: str | None = None
    """Of the group's, where the text speaks of one."""
    best: bool = False
    """It says "up to": of all cases the one where the ratio is farthest from 1 this way."""


def _changes(
    section: str, group: str, says: str, throughput: float, tbt: float, ttft: float
) -> tuple[Claim, ...]:
    """Against recomputation, in per cent, on average."""
    return tuple(
        Claim(section, f"{says}: {what} {change:+g} %", group, key, "mirage", "recompute", ratio)
        for what, key, change in (
            ("throughput", "throughput", throughput),
            ("P99 TBT", "p99_tbt", tbt),
            ("P99 TTFT", "p99_ttft", ttft),
        )
        for ratio in (1 + change / 100,)
    )


CLAIMS = (
    *_changes("7.2", "temporal_c1", "C1, temporal", 39.9, -54.4, -96.7),
    *_changes("7.2", "temporal_c2", "C2, temporal", 45.3, -44.8, -74.8),
    *_changes("7.2, Fig. 9", "rates_c2", "C2, varied rates", 86.7, -82.5, -99.3),
    *_changes("7.2, Fig. 10", "inputs_c2", "C2, long and short inputs", 65.6, -57.1, -98.1),
    Claim(
        "7.2, Fig. 11",
        "C1: MRU, against LRU, up to -22.0 % tail latency (TBT)",
        "temporal_c1",
        "p99_tbt",
        "unpooled",
        "lru",
        0.78,
        best=True,
    ),
    Claim(
        "7.2, Fig. 11",
        "C1: MRU, against LRU, up to -22.0 % tail latency (TTFT)",
        "temporal_c1",
        "p99_ttft",
        "unpooled",
        "lru",
        0.78,
        best=True,
    ),
    *_changes("7.3, Fig. 12", "mps_c1", "C1, spatial, non-strict", 6.6, -65.5, -20.7),
    *_changes("7.3, Fig. 13", "mig_c1", "C1, spatial, strict", 7.9, -57.4, -34.8),
    Claim(
        "7.4",
        "OPT-13b, Alpaca, against Pie: throughput +47.1 %",
        "alone",
        "throughput",
        "mirage",
        "kvswap",
        1.471,
        setting="Alpaca",
    ),
    Claim(
        "7.4",
        "OPT-13b, Alpaca, against Pie: TTFT -93.6 %",
        "alone",
        "p99_ttft",
        "mirage",
        "kvswap",
        0.064,
        setting="Alpaca",
    ),
    Claim(
        "7.4",
        "OPT-13b, Alpaca: matches Pie in tail TBT",
        "alone",
        "p99_tbt",
        "mirage",
        "kvswap",
        1.0,
        setting="Alpaca",
    ),
    Claim(
        "7.5",
        "m = alpha + 1 always, against m = alpha + 2 always: up to -12.7 % throughput",
        "alone",
        "throughput",
        "beta1",
        "beta2",
        0.873,
        setting="Alpaca",
        best=True,
    ),
    Claim(
        "7.5",
        "m = alpha + 1 always, against choosing m: up to -12.7 % throughput",
        "alone",
        "throughput",
        "beta1",
        "mirage",
        0.873,
        setting="Alpaca",
        best=True,
    ),
    Claim(
        "7.6.1",
        "reversion, off peak (a fifth of the peak's rate): P50 TBT -49 %",
        "reversion",
        "p50_tbt",
        "mirage",
        "kept",
        0.51,
        setting="Alpaca",
    ),
    Claim(
        "7.6.1",
        "the same, against neither reversion nor cap",
        "reversion",
        "p50_tbt",
        "mirage",
        "kept_uncapped",
        0.51,
        setting="Alpaca",
    ),
    Claim(
        "7.6.2",
        "capped against aggressive at 10 requests/s: P99 -58 %",
        "cap",
        "p99_tbt",
        "mirage",
        "uncapped",
        0.42,
        setting="Alpaca",
    ),
    Claim(
        "7.6.2",
        "capped against aggressive at 10 requests/s: P50 -44 %",
        "cap",
        "p50_tbt",
        "mirage",
        "uncapped",
        0.56,
        setting="Alpaca",
    ),
)
