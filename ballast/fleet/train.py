"""Train small models by next-token prediction over packed text, on CPU.

Used by `fleet.make` only: serving never trains.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from ballast.fleet.muon import Muon

LENGTH = 128
"""Tokens of one training sequence."""
BATCH = 4


@dataclass(frozen=True, slots=True)
class TrainingLoss:
    """Loss before and after a run, in nats per token, on held-out text."""

    steps: int
    loss_before: float
    loss_after: float


def batches(tokens: Iterator[int], size: int = BATCH, length: int = LENGTH) -> Iterator[Tensor]:
    """(size, length + 1) int64: consecutive pieces of an endless stream of tokens."""
    while True:
        piece = itertools.islice(tokens, size * (length + 1))
        yield torch.tensor(list(piece)).view(size, length + 1)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean cross entropy of the next token, nats."""
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def train(
    model: nn.Module,
    stream: Iterator[Tensor],
    held_out: Tensor,
    steps: int,
    *,
    progress: Callable[[int, float], None] | None = None,
) -> TrainingLoss:
    """Train `model` (float32) in place for `steps` >= 1 batches of `stream`.

    Muon for the layers' matrices, AdamW for embeddings and norms: with a few hundred thousand
    tokens this is the difference between sentences and word salad. Learning rates rise over the
    first twentieth and fall to a tenth along a cosine. `progress(step, loss)` is called after each
    step.
    """
    before = _measure(model, held_out)
    optimizers = _optimizers(model)
    peaks = [group["lr"] for o in optimizers for group in o.param_groups]
    warm = max(1, steps // 20)
    model.train()
    for step in range(steps):
        fall = math.pi * max(0, step - warm) / max(1, steps - warm)
        scale = min((step + 1) / warm, 0.55 + 0.45 * math.cos(fall))
        groups = [group for o in optimizers for group in o.param_groups]
        for group, peak in zip(groups, peaks, strict=True):
            group["lr"] = peak * scale
        loss = loss_of(model, next(stream))
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if progress is not None:
            progress(step + 1, float(loss.detach()))
    return TrainingLoss(steps, before, _measure(model, held_out))


def _measure(model: nn.Module, held_out: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        return float(loss_of(model, held_out))


def _optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    named = list(model.named_parameters())
    matrices = [p for name, p in named if ".layers." in name and p.ndim == 2]
    others = [p for name, p in named if not (".layers." in name and p.ndim == 2)]
    return [
        Muon(matrices, lr=0.03),
        torch.optim.AdamW(others, lr=6e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]
