"""What a largest job allocates stays below the bound that its arena is sized by."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from ballast.core.cost import activation_bytes
from ballast.core.job import SequenceWork
from ballast.core.request import Sampling
from ballast.core.units import MiB, ceil_div
from ballast.models.fused import workspace_bytes
from benchmarks.families import config, make
from tests.models.tiny import Served, llama

CASES = {
    # hidden, intermediate, heads, kv heads, vocabulary, step tokens, step logits
    "usual": (256, 688, 8, 4, 4096, 512, 64),
    "mostly logits": (128, 344, 4, 4, 32000, 256, 64),
    "mostly MLP": (64, 2048, 4, 1, 331, 512, 16),
    "mostly attention": (128, 64, 32, 8, 331, 512, 16),
    "wide": (768, 768, 12, 12, 331, 512, 1),
}


def peak_bytes(served: Served, work: list[SequenceWork]) -> int:
    """Most bytes that PyTorch had allocated at once while it ran the job."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as told:
        served.model.run(work)
    now = peak = 0
    assert told.profiler is not None
    for event in told.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.replace(" ", "-"))
@pytest.mark.filterwarnings("ignore")  # the profiler's own
def test_largest_job_stays_below_its_bound(case: str, dtype: str, tmp_path: Path) -> None:
    hidden, intermediate, heads, kv_heads, vocab, tokens, logits = CASES[case]
    llama(
        tmp_path,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=32,
        vocab_size=vocab,
        num_hidden_layers=2,
    )
    for impl, linear in (("generic", "plain"), ("generic", "packed"), ("fused", "packed")):
        measured, bound = measure(tmp_path, dtype, tokens, logits, impl, linear)
        assert measured > MiB
        assert measured <= bound <= 4 * measured
    measured, bound = measure(tmp_path, dtype, tokens, logits, "fused", "plain")
    assert measured <= bound


_WIDE = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
FAMILIES: dict[str, dict[str, int]] = {
    "qwen3_moe": {**_WIDE, "moe_intermediate_size": 640, "num_experts": 8},
    "mixtral": {**_WIDE, "intermediate_size": 1024},
    "glm4_moe": {**_WIDE, "hidden_size": 512, "moe_intermediate_size": 64},
    "phi3": {**_WIDE, "intermediate_size": 3072},
    "gpt2": {"n_embd": 256, "n_head": 4, "n_inner": 3072},
    "gemma2": {**_WIDE, "intermediate_size": 3072},
    "gpt_neox": {"hidden_size": 256, "num_attention_heads": 8, "intermediate_size": 3072},
}
"""Several experts at once, gate and up in one matrix, activations written in Python."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore")  # the profiler's own
def test_other_families_stay_below_it(family: str, dtype: str, tmp_path: Path) -> None:
    make(tmp_path, config(family, **FAMILIES[family]))
    measured, bound = measure(tmp_path, dtype, 512, 16)
    assert measured > MiB
    assert measured <= bound <= 5 * measured


def measure(
    path: Path, dtype: str, tokens: int, logits: int, impl: str = "generic", linear: str = "plain"
) -> tuple[int, int]:
    """(measured peak, bound) of a largest job."""
    rest = tokens - logits + 1
    blocks = logits + ceil_div(rest, 16)
    served = Served(path, blocks=blocks, dtype=dtype, model_impl=impl, linear=linear)
    # As hard as sampling gets: drawn from a nucleus, with log-probabilities.
    sampling = Sampling(temperature=0.7, top_p=0.9, logprobs=0)
    work = [SequenceWork(str(i), [1], 0, [i], sampling) for i in range(logits - 1)]
    # Different tokens, so that they go to different experts.
    tail = [2 + i % 300 for i in range(rest)]
    work.append(SequenceWork("long", tail, 0, list(range(logits - 1, blocks)), sampling))
    served.model.run(work[-1:])
    measured = peak_bytes(served, work)
    if served.host.fused:
        measured += workspace_bytes(served.spec, tokens, logits)
    bound = activation_bytes(served.spec, tokens, logits)
    served.close()
    return measured, bound


def test_the_bound_grows_with_the_job() -> None:
    from tests.policy.worlds import model

    spec = model("m").spec
    small = activation_bytes(spec, 1, 1)
    assert 0 < small <= activation_bytes(spec, 64, 1) <= activation_bytes(spec, 64, 64)
    assert torch.iinfo(torch.int64).max > activation_bytes(spec, 1 << 20, 1 << 10)
