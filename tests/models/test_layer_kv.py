"""What each layer keeps: latents, its own heads, another layer's KV, a window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ballast.core.errors import UnsupportedModel
from ballast.core.model import LayerKv, plain_kv, uniform_kv
from ballast.models.transformers import _check_adapted
from ballast.weights import latent
from ballast.weights.inspection import inspect_model
from benchmarks.architectures import SPECIAL
from benchmarks.families import config, make
from benchmarks.tiny import tiny
from tests.models.test_families import of, serve, tokens_of
from tests.models.tiny import Served


def test_latents_are_kept_in_place_of_heads(tmp_path: Path) -> None:
    make(tmp_path, config("deepseek_v3"))
    served = Served(tmp_path)
    spec = served.spec
    assert spec.layer_kv == tuple(LayerKv(i, 1, 24, latent=True) for i in range(3))
    assert spec.token_bytes == 3 * 24 * 4
    assert uniform_kv(spec).token_bytes == 3 * 2 * 4 * 24 * 4
    with pytest.raises(UnsupportedModel, match="attention is over latents"):
        _check_adapted(["model.layers.0.self_attn.kv_b_proj"], spec)
    served.close()


def test_latents_of_another_kind_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not compute the same over latents keeps the keys and values of its heads."""
    values = latent._Latent.values
    monkeypatch.setattr(latent._Latent, "values", lambda own, out: values(own, out) * 1.5)
    assert inspect_model(config("deepseek_v3")).layer_kv == ()


def test_layers_that_share_kv_keep_one_copy(tmp_path: Path) -> None:
    shared: dict[str, Any] = SPECIAL["gemma3n_text"]["shared keys"]
    reference = make(tmp_path, tiny("gemma3n_text", **shared))
    a, b = tokens_of(70, 1), tokens_of(29, 2)
    theirs = torch.stack([of(reference, x) for x in (a, b)])
    torch.testing.assert_close(serve(tmp_path, a, b), theirs, rtol=0, atol=2e-4)
    served = Served(tmp_path)
    spec = served.spec
    assert [kv.source for kv in spec.layer_kv] == [None, None, None, None, 2, 3]
    assert set(spec.kv_windows) == {None, 24}
    assert spec.kv_groups * spec.block_bytes == spec.block_tokens * spec.token_bytes
    assert sum(kv.elements for kv in spec.layer_kv) * spec.dtype_bytes <= spec.token_bytes
    assert [kv.group for kv in plain_kv(spec).layer_kv] == [0] * 6
    served.close()
