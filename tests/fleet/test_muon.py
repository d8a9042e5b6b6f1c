"""Muon in float32 does what PyTorch's does in bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ballast.fleet.muon import ITERATIONS, Muon, orthogonal


@pytest.mark.parametrize("shape", [(8, 8), (8, 20), (20, 8)])
def test_singular_values_come_nearer_to_each_other(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    before, after = torch.linalg.svdvals(matrix), torch.linalg.svdvals(orthogonal(matrix))
    assert after.max() < 1.5
    assert after.min() / after.max() > 1.5 * before.min() / before.max()


@pytest.mark.parametrize("shape", [(8, 20), (20, 8)])
def test_steps_are_those_of_pytorch(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(shape, generator=generator)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizers = (
        Muon([ours], lr=0.02),
        torch.optim.Muon([theirs], lr=0.02, weight_decay=0.0, ns_steps=ITERATIONS),
    )
    for _ in range(3):
        grad = torch.randn(shape, generator=generator)
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    moved, expected = ours.detach() - start, theirs.detach() - start
    # bfloat16 keeps two to three digits.
    assert torch.allclose(moved, expected, atol=0.05 * float(expected.abs().max()))
