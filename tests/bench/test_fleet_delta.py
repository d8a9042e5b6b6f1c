"""Fine-tunes as deltas over their base: what is kept, how exact it is, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ballast.bench.fleet_delta import SUMMARY, delta_divergence, make_delta
from ballast.core.errors import BallastError, ConfigError
from ballast.core.settings import AdapterSettings, ModelSettings
from ballast.weights.checkpoint import load_host_model
from benchmarks.families import config, make
from tests.models.tiny import llama, save

CHANGED = ("q_proj", "down_proj")
EVERY = (*CHANGED, "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj")


def tuned(
    base: Path, path: Path, rank: int, size: float = 0.02, changed: tuple[str, ...] = CHANGED
) -> Any:
    """Save a fine-tune in bfloat16 of `rank` in some matrices, `size` of theirs; the model."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_pretrained(base)
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in changed:
            n, k = module.weight.shape
            change = torch.randn(n, rank) @ torch.randn(rank, k)
            change *= size * module.weight.detach().norm() / change.norm()
            module.weight.data += change
    return save(model, path, dtype=torch.bfloat16)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    llama(tmp_path / "base", hidden_size=128, intermediate_size=192, dtype=torch.bfloat16)
    return tmp_path / "base"


def test_a_fine_tune_of_low_rank_is_kept_within_rounding(base: Path, tmp_path: Path) -> None:
    tuned(base, tmp_path / "tune", rank=3, size=0.1)
    made = make_delta(base, tmp_path / "tune", tmp_path / "delta")
    assert {m.rpartition(".")[2] for m in made.ranks} == set(CHANGED)
    assert set(made.ranks.values()) == {3}  # what rounding adds is left off
    assert 0.0 < made.worst <= 2.0**-8
    assert 4 * made.n_bytes < made.whole_bytes
    assert not made.other_text
    written = json.loads((tmp_path / "delta" / SUMMARY).read_text())
    assert written["worst"] == made.worst
    assert written["ranks"] == made.ranks
    near, alone = delta_divergence(base, tmp_path / "tune", tmp_path / "delta")
    assert near.same >= alone.same
    assert near.nats < alone.nats / 20


def test_a_delta_is_an_adapter_of_its_base(base: Path, tmp_path: Path) -> None:
    tune = tuned(base, tmp_path / "tune", rank=2).float()
    make_delta(base, tmp_path / "tune", tmp_path / "delta")
    adapters = (AdapterSettings(name="tune", path=str(tmp_path / "delta")),)
    host = load_host_model(ModelSettings(name="base", path=str(base), adapters=adapters))
    assert not host.failed
    module = tune.model.layers[2].mlp.down_proj.weight.detach()
    before = AutoModelForCausalLM.from_pretrained(base).float()
    kept = next(d for d in host.adapters[0].deltas if d.module == "model.layers.2.mlp.down_proj")
    assert (kept.rank, kept.scale) == (2, 1.0)
    change = module - before.model.layers[2].mlp.down_proj.weight.detach()
    assert change.norm() > 0.01 * module.norm()
    host.close()


def test_what_is_no_delta_is_refused_by_name(base: Path, tmp_path: Path) -> None:
    def refused(tune: Path, match: str, **more: Any) -> None:
        with pytest.raises(BallastError, match=match):
            make_delta(base, tune, tmp_path / "delta", **more)
        assert not (tmp_path / "delta").exists()

    refused(base, "there is nothing to keep")
    tuned(base, tmp_path / "high", rank=60, size=0.3, changed=EVERY)
    refused(tmp_path / "high", r"down_proj.weight: .* a rank above 8: raise --rank", rank=8)
    refused(tmp_path / "high", "takes more than half its bytes")
    normed = tuned(base, tmp_path / "low", rank=2)
    normed.model.layers[1].input_layernorm.weight.data *= 1.1
    save(normed, tmp_path / "normed", dtype=torch.bfloat16)
    refused(tmp_path / "normed", r"1.input_layernorm.weight: a delta would leave off")
    make(tmp_path / "other", config("llama"))
    refused(tmp_path / "other", "not siblings")
    refused(tmp_path / "low", "--tolerance", tolerance=0.0)
    make_delta(base, tmp_path / "low", tmp_path / "once")
    with pytest.raises(ConfigError, match="is there already"):
        make_delta(base, tmp_path / "low", tmp_path / "once")
