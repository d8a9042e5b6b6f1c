"""The speed of a mixture of experts served alone: against `transformers`, and its own matrices.

Two random models of about 500M parameters in bfloat16, in the shapes of Mixtral (8 experts, of
which a token goes through 2) and of Qwen3-MoE (64 small ones, 8), 16 streams of 128 + 128 tokens,
all in process. Engines, turns and yardsticks are those of `single_model`.

- `vs_transformers`: tokens per second over the better of `generate` and continuous batching; the
  lesser of the two models. The second model runs only what was better at the first.
- `over_gemm`: seconds of a decode step in which every stream gets a token, over the sum of the
  matrix products of the experts that were chosen in such a step, each with as many rows as it had,
  and of all other matrices, each by the fastest known kernel; the greater of the two models.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from ballast.bench.inprocess import InProcess
from ballast.core.event import JobResult
from ballast.core.job import SequenceWork
from ballast.core.request import Submission
from ballast.core.settings import DeviceSettings, FleetSettings, ModelSettings
from ballast.core.units import MiB
from ballast.models.fused.model import FusedModel
from benchmarks.common import finish, options
from benchmarks.known_gemms import Gemms, Matrix, Reader, kernels
from benchmarks.single_model import (
    CONTINUOUS,
    GENERATE,
    HEAD_DIM,
    OURS,
    PROMPT,
    VOCAB,
    Phase,
    measure,
    prompts,
    save_random,
    table,
)

STREAMS = 16
STEPS = 4
"""Decode steps of all streams, the last of which says which experts are chosen."""

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Mixture:
    """A decoder whose layers all have experts."""

    name: str
    kind: Any
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    experts: int
    top_k: int
    particular: tuple[tuple[str, Any], ...]

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * 2 * self.layers * self.kv_heads * HEAD_DIM

    def make(self, directory: Path, seed: int = 0) -> int:
        """Write a random checkpoint; returns its number of parameters."""
        torch.manual_seed(seed)
        kind: Any = MixtralConfig if self.kind is MixtralForCausalLM else Qwen3MoeConfig
        config = kind(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=HEAD_DIM,
            num_experts_per_tok=self.top_k,
            vocab_size=VOCAB,
            max_position_embeddings=2048,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
            dtype=torch.bfloat16,
            **dict(self.particular),
        )
        return save_random(self.kind, config, directory)

    def gemms(self, path: Path, streams: int) -> Gemms:
        """The matrix products of a decode step of the checkpoint at `path`."""
        return Gemms(self.matrices(chosen(path, streams)), streams)

    def matrices(self, counts: Array) -> tuple[Matrix, ...]:
        """Of a decode step in which the experts have had `counts` (layers, experts) rows: those of
        an expert together with all that had as many rows."""
        h, kv, q = self.hidden, self.kv_heads * HEAD_DIM, self.heads * HEAD_DIM
        by_rows = sorted(Counter(int(n) for n in counts.flat if n).items())
        experts = [
            matrix
            for rows, number in by_rows
            for matrix in (
                Matrix(f"gate_up of {rows}", 2 * self.inner, h, number, rows),
                Matrix(f"down of {rows}", h, self.inner, number, rows),
            )
        ]
        return (
            Matrix("qkv", q + 2 * kv, h, self.layers),
            Matrix("o", h, q, self.layers),
            Matrix("router", self.experts, h, self.layers),
            *experts,
            Matrix("head", VOCAB, h, 1),
        )


MIXTURES = (
    Mixture(
        "Mixtral-shaped",
        MixtralForCausalLM,
        *(1024, 1408, 12, 16, 4, 8, 2),
        (("intermediate_size", 1408), ("num_local_experts", 8), ("sliding_window", None)),
    ),
    Mixture(
        "Qwen3-MoE-shaped",
        Qwen3MoeForCausalLM,
        *(1024, 192, 12, 16, 4, 64, 8),
        (
            ("intermediate_size", 768),
            ("moe_intermediate_size", 192),
            ("num_experts", 64),
            ("norm_topk_prob", True),
        ),
    ),
)


def chosen(path: Path, streams: int) -> Array:
    """int64 (layers, experts): rows that each expert had in a decode step of all streams."""
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    settings = FleetSettings(
        models=(ModelSettings(name="model", path=str(path), dtype="bfloat16"),),
        device=DeviceSettings(budget_bytes=(size // MiB + 512) * MiB, prefix_cache=False),
    )
    found: list[Array] = []
    with InProcess(settings) as server:
        (model,) = server.device.executors["model"]
        assert isinstance(model, FusedModel)
        assert model.experts is not None
        experts, run = model.experts, model.run

        def observed(work: Sequence[SequenceWork]) -> list[JobResult]:
            results = run(work)
            if len(work) == streams and all(len(w.tokens) == 1 for w in work):
                found.append(experts.counts)
            return results

        model.run = observed  # type: ignore[method-assign]
        server.generate(
            [
                Submission(
                    id=str(i), model="model", prompt=tuple(p), max_tokens=64, ignore_eos=True
                )
                for i, p in enumerate(prompts(streams, PROMPT))
            ]
        )
    assert len(found) > STEPS, "streams have not decoded side by side"
    return found[STEPS]


def more_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only", choices=[m.name for m in MIXTURES], help="one model, instead of both"
    )
    parser.add_argument(
        "--without", choices=(GENERATE, CONTINUOUS), help="leave out what is known to be slower"
    )
    parser.set_defaults(peer=None)


def main() -> None:
    args = options(__doc__, extra=more_options)
    phases: list[Phase] = []
    outcome: dict[str, Any] = {}
    leave_out = [args.without]
    with tempfile.TemporaryDirectory() as scratch:
        reader = Reader()
        for mixture in (m for m in MIXTURES if args.only in (None, m.name)):
            taken, about = measure(mixture, args, reader, Path(scratch), leave_out, (STREAMS,))
            phases += taken
            leave_out = [n for n in (GENERATE, CONTINUOUS) if n != taken[0].better()]
            matrices = taken[0].gemms.matrices
            outcome[mixture.name] = {
                **about,
                "experts_read": sum(m.count for m in matrices if m.name.startswith("gate_up")),
                "experts": mixture.layers * mixture.experts,
                **taken[0].to_json(),
            }
    result = {
        "vs_transformers": min(p.rate(OURS) / p.rate(p.better()) for p in phases),
        "over_gemm": max(p.over_gemm().median for p in phases),
        "reader": reader.best(),
        "kernels": list(kernels()),
        "models": outcome,
    }
    finish(args, "moe", result, table(phases, "moe"))


if __name__ == "__main__":
    main()
