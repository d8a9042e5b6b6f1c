"""Models with KV in 8 bits: what they compute is `transformers` on rounded keys and values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ballast.core.errors import ConfigError, UnsupportedModel
from ballast.core.settings import DeviceSettings, ModelSettings
from ballast.core.units import MiB
from ballast.engine.sizing import check_room
from ballast.models.divergence import kv_divergence
from ballast.models.on_cpu import on_cpu
from ballast.weights.checkpoint import load_host_model
from benchmarks.families import config, make
from benchmarks.kv_kinds import rounded_kv
from benchmarks.tiny import tiny
from tests.models.test_families import of, serve, tokens_of
from tests.models.tiny import Served, llama

NEAR = 5e-3
"""Difference of logits: elements between two steps may be rounded to either."""
PATHS: dict[str, dict[str, Any]] = {
    "generic": {},
    "fused": {"model_impl": "fused", "linear": "packed"},
}


@pytest.mark.parametrize("path", PATHS)
def test_a_decoder_on_rounded_kv(path: str, tmp_path: Path) -> None:
    reference = llama(tmp_path)
    a, b = tokens_of(70, 1), tokens_of(29, 2)
    full = torch.stack([of(reference, x) for x in (a, b)])
    with rounded_kv(reference):
        theirs = torch.stack([of(reference, x) for x in (a, b)])
    ours = serve(tmp_path, a, b, kv_dtype="int8", **PATHS[path])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=NEAR)
    assert (theirs - full).abs().max() > 3 * NEAR  # or nothing would have been tested


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_next", "gemma3n_text"])
def test_windows_states_and_shared_layers_on_rounded_kv(family: str, tmp_path: Path) -> None:
    reference = make(tmp_path, tiny(family))
    a, b = tokens_of(70, 1), tokens_of(29, 2)
    with rounded_kv(reference):
        theirs = torch.stack([of(reference, x) for x in (a, b)])
    ours = serve(tmp_path, a, b, kv_dtype="int8", block_tokens=16)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2 * NEAR)


def test_its_bytes_and_its_names_are_its_own(tmp_path: Path) -> None:
    llama(tmp_path)
    full, kept = Served(tmp_path), Served(tmp_path, kv_dtype="int8")
    assert kept.spec.token_bytes == 3 * 2 * 2 * (16 + 4)  # elements, and a scale for each head
    assert kept.spec.block_bytes == 16 * kept.spec.token_bytes
    assert full.spec.token_bytes == 3 * 2 * 2 * 16 * 4
    assert kept.spec.fingerprint != full.spec.fingerprint  # the names of blocks begin with it
    assert kept.spec.segment_digests == full.spec.segment_digests  # weights are shared
    full.close(), kept.close()


def test_what_cannot_keep_it_is_refused_by_name(tmp_path: Path) -> None:
    make(tmp_path / "latent", config("deepseek_v3"))
    settings = ModelSettings(name="m", path=str(tmp_path / "latent"), kv_dtype="int8")
    with pytest.raises(UnsupportedModel, match="kv_dtype int8: its attention keeps latents"):
        load_host_model(settings)
    llama(tmp_path / "llama")
    served = Served(tmp_path / "llama", kv_dtype="int8")
    gpu = DeviceSettings(name="cuda:0", budget_bytes=512 * MiB)
    with pytest.raises(ConfigError, match="cuda:0 is a GPU"):
        check_room(served.spec, [], gpu)
    check_room(replace(served.spec, kv_dtype="auto"), [], gpu)
    served.close()


def test_its_divergence_is_measured(tmp_path: Path) -> None:
    llama(tmp_path)
    device = DeviceSettings(budget_bytes=64 * MiB)
    for impl, linear in (("generic", "plain"), ("fused", "packed")):
        settings = ModelSettings(
            name="m", path=str(tmp_path), kv_dtype="int8", model_impl=impl, linear=linear
        )
        host = load_host_model(settings)
        found = kv_divergence(host, on_cpu, device)
        assert found is not None
        assert found.tokens == 64
        assert 0.0 < found.nats < 0.05
        assert found.same > 48
        assert f"at {found.same} of 64 positions" in str(found)
        host.spec = replace(host.spec, kv_dtype="auto")
        assert kv_divergence(host, on_cpu, device) is None
        host.close()
