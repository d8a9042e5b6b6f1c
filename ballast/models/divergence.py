"""Measure how far a model's outputs are from another's that it stands for, by a text.

One of them writes a text, sampled from what it computes; the other reads the same text. At each
position the two distributions of the next token are compared. Used for KV in 8 bits against KV in
the model's dtype, when a model is loaded, and for a fine-tune as a delta against the fine-tune.
Runs on weights in the host tier. CPU devices only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ballast.core.job import SequenceWork
from ballast.core.model import INT8
from ballast.core.request import Sampling
from ballast.core.settings import DeviceSettings
from ballast.core.units import ceil_div
from ballast.kernels.workspace import Workspace
from ballast.kv.layout import Layout
from ballast.models.fused.workspace import workspace_bytes
from ballast.models.profile_run import PAGE_BYTES, Make, intraop_threads
from ballast.weights.host import HostModel

TOKENS = 64
"""Tokens of the text: a decode step for each, of both models."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Comparison of the distributions of the next token at `tokens` positions."""

    tokens: int
    same: int
    """Positions at which the likeliest token is the same."""
    nats: float
    """Kullback-Leibler divergence a token, on average, from the model that wrote the text."""

    def __str__(self) -> str:
        return (
            f"the likeliest token is the same at {self.same} of {self.tokens} positions, "
            f"divergence {self.nats:.2g} nats a token"
        )


def kv_divergence(host: HostModel, make: Make, device: DeviceSettings) -> Divergence | None:
    """Compare KV in `host.spec.kv_dtype` with KV in the model's dtype; None if they are the same,
    or the model does not generate."""
    if host.spec.kv_dtype != INT8 or not host.spec.generates:
        return None
    own = replace(host, spec=replace(host.spec, kv_dtype="auto"))
    return compare(TextReader(own, make, device), TextReader(host, make, device))


class TextReader:
    """A model that reads one sequence of at most `TOKENS` tokens, token by token."""

    def __init__(
        self, host: HostModel, make: Make, device: DeviceSettings, adapter: int | None = None
    ) -> None:
        """`make`: as of `measured`; `adapter`: index of that which it reads with."""
        self.spec = spec = host.spec
        self._adapter, self._threads = adapter, device.threads
        layout = Layout.of(spec, PAGE_BYTES)
        self._blocks = range(ceil_div(TOKENS, spec.block_tokens) * spec.kv_groups)
        slabs = ceil_div(len(self._blocks), layout.blocks_per_slab)
        size = (device.step_tokens, device.step_logits)
        self._workspace = Workspace(workspace_bytes(spec, *size, host.recipe))
        self._kv = Workspace(slabs * layout.slab_bytes)
        where = (host.addresses, self._kv.address, layout, self._workspace)
        self._executor = make(host, *where, device)

    @torch.inference_mode()
    def next(self, token: int, position: int) -> torch.Tensor:
        """Return the log-probabilities (vocab,) float32 of the token after `token`."""
        at = (position, self._blocks, Sampling(), self._adapter)
        with intraop_threads(self._threads):
            logits = self._executor.logits([SequenceWork("divergence", [token], *at)])
        return logits[0].float().log_softmax(-1)


def compare(own: TextReader, other: TextReader) -> Divergence:
    """Compare two models with one vocabulary over a text that `own` writes."""
    spec, generator = own.spec, torch.Generator().manual_seed(0)
    token = spec.eos_token_ids[0] if spec.eos_token_ids else 0
    n = min(TOKENS, spec.max_model_len)
    same, nats = 0, 0.0
    for position in range(n):
        expected, found = own.next(token, position), other.next(token, position)
        same += int(expected.argmax() == found.argmax())
        probabilities = expected.exp()
        nats += float((probabilities * (expected - found)).nansum())
        if not probabilities.isfinite().all():
            break  # its requests fail: it writes nothing
        token = int(torch.multinomial(probabilities, 1, generator=generator))
    return Divergence(n, same, max(0.0, nats / n))
