"""Tokens chosen on a device are the host's, for all parameters and however close a row is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ballast.core.request import Sampling
from ballast.kernels import sampling
from ballast.kernels.gpu import sampling as gpu_sampling
from ballast.kernels.gpu.sampling import GpuSampler
from tests.kernels.triton_here import compiled, run_cases

Array = np.ndarray[Any, Any]
CPU = torch.device("cpu")


def exact_scores(row: Array, p: Sampling, position: int) -> Array:
    """What Gumbel-max compares, float64 (vocab,)."""
    key = p.seed & 0xFFFFFFFFFFFFFFFF
    words = [
        sampling.philox(
            *(np.uint64(x) for x in (token, position, p.choice, 0, key & 0xFFFFFFFF, key >> 32))
        )
        for token in range(len(row))
    ]
    high, low = (np.array([int(w[i]) for w in words], np.float64) for i in range(2))
    uniform = (high * 2.0**20 + np.floor(low / 4096.0) + 0.5) / 2.0**52
    return row.astype(np.float64) * (1.0 / p.temperature) - np.log(-np.log(uniform))


def drawn_logits(generator: np.random.Generator, n: int, vocab: int) -> Array:
    """Rows of all kinds: as models have them, of few values, masked in part, far apart."""
    rows = generator.standard_normal((n, vocab)) * generator.choice([0.1, 3.0, 20.0, 4e3], (n, 1))
    few = generator.random((n, 1)) < 0.3
    rows = np.where(few, np.round(rows), rows).astype(np.float32)
    masked = generator.random((n, vocab)) < generator.choice([0.0, 0.0, 0.9], (n, 1))
    masked[:, 0] = False
    rows[masked] = -np.inf
    return rows


class OfHost:
    """Implements `GumbelMax` by the host, and is not sure of every `doubtful`th row, if any."""

    def __init__(self, doubtful: int | None = None) -> None:
        self._doubtful = doubtful
        self.rows: list[int] = []

    def __call__(
        self,
        logits: Tensor,
        rows: Sequence[int],
        params: Sequence[Sampling],
        positions: Sequence[int],
    ) -> list[int | None]:
        self.rows += rows
        assert all(p.logprobs is None and p.temperature > 0.0 for p in params)
        assert all(p.top_p >= 1.0 and p.min_p == 0.0 for p in params)
        tokens, _ = sampling.sample(logits[list(rows)], params, positions)
        n = self._doubtful
        return [None if n and i % n == 0 else token for i, token in zip(rows, tokens, strict=True)]


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-3, 0.2, 0.7, 1.0, 3.0, 1e20]),
    top_p=st.sampled_from([1.0, 1.0, 0.0, 0.3, 0.9, 0.999, 1.0 - 1e-12]),
    top_k=st.sampled_from([0, 0, 1, 5, 15, 16, 17, 200, 100_000]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.9, 1.0, 1e-9]),
    seed=st.integers(-(2**63), 2**64 - 1),
    choice=st.integers(0, 3),
    logprobs=st.sampled_from([None, None, None, 0, 2]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.0, 0.5]),
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(samplings, min_size=1, max_size=6),
    st.sampled_from([3, 16, 17, 40, 300]),
    st.integers(0, 2**32),
    st.booleans(),
)
@example([Sampling(temperature=1.0, top_p=0.9)] * 3, 300, 1, True)
def test_its_tokens_are_the_hosts(
    params: list[Sampling], vocab: int, seed: int, whole: bool
) -> None:
    generator = np.random.default_rng(seed)
    logits = torch.from_numpy(drawn_logits(generator, len(params), vocab))
    before = logits.clone()
    positions = generator.integers(0, 1000, len(params)).tolist()
    shapes = {
        i: sampling.SamplingContext([1, 2, 1], 1)
        for i, p in enumerate(params)
        if p.presence_penalty
    }
    expected = sampling.sample(logits, params, positions, shapes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_sampling, "CANDIDATES", 16)
        patch.setattr(gpu_sampling, "CHUNK_BYTES", 8 * vocab)
        sampler = GpuSampler(CPU, OfHost(3) if whole else None)
        assert sampler.sample(logits, params, positions, shapes) == expected
    assert torch.equal(logits, before)
    if not any(p.temperature > 0.0 or p.logprobs is not None or p.shaped for p in params):
        assert sampler.moved == 0


def test_rows_as_models_have_them_stay_where_they_are() -> None:
    """With a vocabulary of a model's size and the parameters that clients send."""
    torch.manual_seed(0)
    logits = torch.randn(24, 32_000) * 2.5
    logits[:, :40] += 9.0  # what is likely at all
    asked = [
        Sampling(temperature=0.6, top_p=0.9),
        Sampling(temperature=1.0, top_k=20, top_p=0.95),
        Sampling(temperature=1.0, top_k=64),
        Sampling(temperature=0.8, min_p=0.05),
        Sampling(temperature=0.7, top_p=0.8, top_k=20, min_p=0.01),
        Sampling(),
    ]
    params = [Sampling(**{**_fields(asked[i % len(asked)]), "seed": i}) for i in range(len(logits))]
    sampler = GpuSampler(CPU)
    found = sampler.sample(logits, params, range(24), {})
    assert found == sampling.sample(logits, params, range(24))
    assert sampler.moved == 0


def _fields(p: Sampling) -> dict[str, Any]:
    return {name: getattr(p, name) for name in ("temperature", "top_p", "top_k", "min_p")}


def test_logits_that_are_on_the_host_already_are_sampled_there() -> None:
    logits = torch.randn(2, 50)
    params = [Sampling(temperature=1.0, seed=i) for i in range(2)]
    sampler = GpuSampler(torch.device("meta"), OfHost(3))
    assert sampler.sample(logits, params, [1, 2], {}) == sampling.sample(logits, params, [1, 2])
    assert sampler.moved == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU")
def test_cases_hold_on_a_gpu() -> None:
    run_cases("sampling_cases.py", TRITON_INTERPRET="0")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU")
def test_on_a_gpu_its_tokens_are_the_hosts() -> None:
    torch.manual_seed(1)
    device = torch.device("cuda", 0)
    sampler, of_host = GpuSampler(device), GpuSampler(CPU, OfHost())
    rows = 0
    for seed in range(20):
        logits = torch.randn(64, 128_256) * 3
        params = [
            Sampling(
                temperature=[0.0, 0.3, 0.7, 1.0, 1.5][i % 5],
                top_p=[1.0, 1.0, 0.9][i % 3],
                top_k=[0, 0, 0, 50][i % 4],
                seed=1000 * seed + i,
            )
            for i in range(64)
        ]
        found = sampler.sample(logits.to(device), params, range(64), {})
        assert found == of_host.sample(logits, params, range(64), {})
        assert found == sampling.sample(logits, params, range(64))
        rows += 64
    # Beside rows whose top-p takes in more than the candidates: those that are too close.
    assert sampler.moved - of_host.moved < rows / 100


@pytest.mark.parametrize("capability", [80, 100])
def test_what_a_gpu_gets_reads_four_logits_at_once(capability: int) -> None:
    from ballast.kernels.triton.sampling_code import gumbel_max_code

    types = {
        **dict.fromkeys(("logits", "inverses", "found"), "*fp32"),
        **dict.fromkeys(("rows", "tokens"), "*i32"),
        "keys": "*i64",
    }
    aligned = ("logits", "rows", "inverses", "keys", "found", "tokens", "row_stride", "vocab")
    made = compiled(gumbel_max_code, types, {"BLOCK": 2048}, aligned, capability, num_warps=8)
    ptx = made.asm["ptx"]
    assert "ld.global.v4" in ptx
    assert ".f64" not in ptx
    # The logarithm is `logf`; the bound would hold for the special unit's, too.
    assert "lg2.approx" not in ptx
