"""Rows without a finite maximum have no token on a GPU either, however they are sampled."""

from __future__ import annotations

import pytest
import torch

from ballast.kernels.gpu.sampling import GpuSampler
from ballast.kernels.sampling import NoToken, SamplingContext, sample
from tests.kernels.test_nonfinite_sampling import DAMAGES, PARAMS

VOCAB = 5000
"""More than the device's candidates, and than one block of its kernels."""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU")
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.replace(" ", "-"))
def test_one_row_ends_and_no_other(damage: str) -> None:
    torch.manual_seed(1)
    n = len(PARAMS)
    logits = torch.randn(n, VOCAB)
    shapes = {i: SamplingContext([1, 2, 3], 2) for i, p in enumerate(PARAMS) if p.shaped}
    sampler = GpuSampler(torch.device("cuda"))
    for bad in range(n):
        damaged = logits.clone()
        DAMAGES[damage](damaged[bad])
        expected, _ = sample(damaged, PARAMS, range(n), shapes)
        tokens, _ = sampler.sample(damaged.cuda(), PARAMS, range(n), shapes)
        assert tokens == expected
        assert tokens[bad] is NoToken.NOT_FINITE
