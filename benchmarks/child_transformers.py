"""`transformers` as a contestant: `generate`, or its continuous batching."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    StaticCache,
)

from benchmarks.child import Prompts, Run, serve

MOST_TOKENS = 256
"""Of prompt and output: the static cache's length."""
STREAMS = 16
PAGE = 128


class Stamps:
    """Given to `generate` as its streamer: when the prompt and then each token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def load(path: str, how: str) -> tuple[Run, Mapping[str, Any]]:
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()
    runs = {"generate": generate, "dynamic": generate_dynamic, "continuous": continuous}
    return runs[how](model), {"transformers": transformers.__version__, "torch": torch.__version__}


def generate(model: Any) -> Run:
    """With a static cache: its shapes stay the same, so that nothing is compiled in the middle."""
    caches: dict[int, StaticCache] = {}

    def run(prompts: Prompts, new_tokens: int) -> list[list[float]]:
        cache = caches.get(len(prompts))
        if cache is None:
            cache = caches[len(prompts)] = StaticCache(model.config, max_cache_len=MOST_TOKENS)
        with torch.inference_mode():
            cache.reset()
        return _generate(model, prompts, new_tokens, past_key_values=cache)

    return run


def generate_dynamic(model: Any) -> Run:
    """With the cache that `generate` takes by default."""
    return lambda prompts, new_tokens: _generate(model, prompts, new_tokens)


def _generate(model: Any, prompts: Prompts, new_tokens: int, **more: Any) -> list[list[float]]:
    stamps = Stamps()
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            streamer=stamps,
            disable_compile=True,
            **more,
        )
    assert output.shape == (len(prompts), ids.shape[1] + new_tokens), output.shape
    return [stamps.times[1:] for _ in prompts]


def continuous(model: Any) -> Run:
    config = ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=STREAMS * (MOST_TOKENS // PAGE + 1),
        max_batch_tokens=2048,
        allow_block_sharing=False,
    )

    def run(prompts: Prompts, new_tokens: int) -> list[list[float]]:
        chosen = GenerationConfig(
            max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        results = model.generate_batch(
            prompts,
            generation_config=chosen,
            continuous_batching_config=config,
            record_timestamps=True,
        )
        if len(results) != len(prompts):
            raise RuntimeError(f"{len(results)} answers to {len(prompts)} prompts")
        for result in results.values():
            if result.error is not None:
                raise RuntimeError(result.error)
            assert len(result.generated_tokens) == new_tokens
        return [result.timestamps for result in results.values()]

    return run


if __name__ == "__main__":
    serve(lambda: load(sys.argv[1], sys.argv[2]))
