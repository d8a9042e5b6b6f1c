"""Reads the tables of measured GPU latencies that profiles are fitted to."""

from __future__ import annotations

import csv
import gzip
import io
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ballast.sim.model_catalogue import ModelFacts
from ballast.sim.roofline import Hardware
from scripts.point_fits import Points

Pair = tuple[str, str]
"""Device, model (its name in the catalogue)."""

ALIASES = {
    "llama27bchat": "Llama-2-7b",
    "llama213bchat": "Llama-2-13b",
}
"""Of names in the measurements that differ from the catalogue's by more than punctuation."""
PAPERS = {
    "000": "MIRAGE",
    "001": "Prism",
    "002": "SwiftCache",
    "003": "C2CServe",
    "004": "MuxServe",
}
DECODE_AHEAD = 5
"""A measured decode is the mean of nine steps after the prompt: they read it and 5 tokens more."""


@dataclass(frozen=True, slots=True)
class Tables:
    """What was measured, and of what."""

    hardware: dict[str, Hardware]
    models: dict[str, ModelFacts]
    prefill: dict[Pair, Points] = field(default_factory=dict)
    decode: dict[Pair, Points] = field(default_factory=dict)

    def phase(self, name: str) -> dict[Pair, Points]:
        """`prefill` or `decode`."""
        return self.prefill if name == "prefill" else self.decode

    def named(self, measured: str) -> str:
        """The catalogue's name of a model as the measurements call it."""
        plain = _plain(measured)
        names = {_plain(name): name for name in self.models} | ALIASES
        return names[plain]


def rows(file: Path) -> Iterator[dict[str, str]]:
    """Of a CSV, compressed or not."""
    data = file.read_bytes()
    text = (gzip.decompress(data) if file.suffix == ".gz" else data).decode("utf-8")
    yield from csv.DictReader(io.StringIO(text))


def read_tables(folder: Path) -> Tables:
    tables = Tables(
        hardware={r["gpu"]: _hardware(r) for r in rows(folder / "hardware.csv")},
        models={r["model"]: _facts(r) for r in rows(folder / "models.csv")},
    )
    # Measured apart from the base it was tuned from; the same architecture.
    chat = {"name": "Qwen-7b-chat"}
    tables.models["Qwen-7b-chat"] = tables.models["Qwen-7b"].model_copy(update=chat)
    taken: dict[str, dict[Pair, list[tuple[float, float, float]]]] = {
        "prefill": defaultdict(list),
        "decode": defaultdict(list),
    }
    for r in rows(folder / "latency_points.csv.gz"):
        batch, length = int(r["batch"]), int(r["input_tokens_per_seq"])
        tokens = batch * (length + (DECODE_AHEAD if r["phase"] == "decode" else 0))
        pair = (r["gpu"], tables.named(r["model"]))
        taken[r["phase"]][pair].append((batch, tokens, float(r["seconds_median"])))
    tables.prefill.update({pair: Points.of(p) for pair, p in sorted(taken["prefill"].items())})
    tables.decode.update({pair: Points.of(p) for pair, p in sorted(taken["decode"].items())})
    return tables


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def _named(text: str) -> str:
    """The tables number the papers."""
    for number, paper in PAPERS.items():
        text = text.replace(f"paper {number}", paper)
    return text.replace(" and 003:", " and C2CServe:")


def _hardware(r: dict[str, str]) -> Hardware:
    peer = r["peer_gbs_per_dir"]
    keys = {
        "hbm_gb": "memory_bytes",
        "hbm_tbs": "memory_bandwidth",
        "bf16_dense_tflops": "flops",
        "host_gbs_per_dir": "host_bandwidth",
        "sms": "multiprocessors",
    }
    return Hardware(
        memory_bytes=int(r["hbm_gb"]) * 10**9,
        memory_bandwidth=float(f"{r['hbm_tbs']}e12"),
        flops=float(f"{r['bf16_dense_tflops']}e12"),
        multiprocessors=int(r["sms"]),
        host_link=r["host_link"],
        host_bandwidth=float(f"{r['host_gbs_per_dir']}e9"),
        peer_link=r["peer_link"],
        peer_bandwidth=float(f"{peer}e9") if peer else None,
        source=_named(r["sources"]),
        unverified=[keys[k] for k in r["unverified"].split(";") if k],
        note=_named(r["notes"]),
    )


def _facts(r: dict[str, str]) -> ModelFacts:
    return ModelFacts(
        name=r["model"],
        parameters=int(r["params"]),
        active_parameters=int(r["params_active"]),
        layers=int(r["layers"]),
        hidden=int(r["hidden"]),
        heads=int(r["heads"]),
        kv_heads=int(r["kv_heads"]),
        head_dim=int(r["head_dim"]),
        intermediate=int(r["intermediate"]),
        vocab=int(r["vocab"]),
        experts=int(r["experts"]),
        experts_per_token=int(r["experts_per_token"]),
        shared_intermediate=int(r["shared_expert_intermediate"]),
        tied=r["tied_embeddings"] == "1",
    )
