"""Rows of logits without a finite maximum have no token; rows beside them have theirs."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from ballast.core.request import Sampling
from ballast.kernels.gpu.sampling import GpuSampler
from ballast.kernels.sampling import NoToken, SamplingContext, sample
from tests.kernels.gpu.test_gpu_sampling import OfHost

VOCAB = 50
CPU = torch.device("cpu")
Damage = Callable[[torch.Tensor], object]
DAMAGES: dict[str, Damage] = {
    "all NaN": lambda row: row.fill_(math.nan),
    "NaN first": lambda row: row[:1].fill_(math.nan),
    "NaN last": lambda row: row[-1:].fill_(math.nan),
    "+inf": lambda row: row[7:8].fill_(math.inf),
    "all -inf": lambda row: row.fill_(-math.inf),
    "NaN among -inf": lambda row: row.fill_(-math.inf)[3:4].fill_(math.nan),
}
PARAMS = [
    Sampling(),
    Sampling(logprobs=3),
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_p=0.9),
    Sampling(temperature=0.7, top_k=5),
    Sampling(temperature=0.7, min_p=0.1),
    Sampling(temperature=0.7, top_k=9, top_p=0.5, min_p=0.01, logprobs=0),
    Sampling(presence_penalty=0.5),
    Sampling(temperature=0.9, logit_bias=((3, 5.0),), top_p=0.9),
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.replace(" ", "-"))
@pytest.mark.parametrize("bad", range(len(PARAMS)))
def test_one_row_ends_and_no_other(damage: str, bad: int) -> None:
    torch.manual_seed(1)
    logits = torch.randn(len(PARAMS), VOCAB)
    shapes = {i: SamplingContext([1, 2, 3], 2) for i, p in enumerate(PARAMS) if p.shaped}
    expected, expected_scores = sample(logits, PARAMS, range(len(PARAMS)), shapes)
    assert all(isinstance(t, int) and 0 <= t < VOCAB for t in expected)
    DAMAGES[damage](logits[bad])
    for sampler in (sample, GpuSampler(CPU, OfHost(1)).sample):
        tokens, scored = sampler(logits, PARAMS, range(len(PARAMS)), shapes)
        assert tokens[bad] is NoToken.NOT_FINITE
        assert [t for i, t in enumerate(tokens) if i != bad] == [
            t for i, t in enumerate(expected) if i != bad
        ]
        assert scored == {i: s for i, s in expected_scores.items() if i != bad}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_that_leaves_no_token_is_at_fault_itself(temperature: float) -> None:
    logits = torch.zeros(1, 4)
    logits[0, 2] = -math.inf
    allowed = np.array([False, False, True, False])
    p = Sampling(temperature=temperature, grammar="g")
    tokens, _ = sample(logits, [p], [1], {0: SamplingContext([1], 1, allowed)})
    assert tokens == [NoToken.NONE_LEFT]
