"""Fine-tunes as deltas over their base: what is kept, how exact it is, and what is refused."""

from __future__ import annotations

import gc
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ballast.bench.few_bits import few_bits
from ballast.bench.fleet_delta import SUMMARY, delta_divergence, make_delta
from ballast.core.errors import BallastError, ConfigError
from ballast.core.job import SequenceWork
from ballast.core.settings import AdapterSettings, DeviceSettings, ModelSettings
from ballast.core.units import MiB
from ballast.engine.sizing import check_room
from ballast.weights.adapter import load_adapter
from ballast.weights.checkpoint import load_host_model
from ballast.weights.host import HostTier
from ballast.weights.meta_module import linear_modules
from benchmarks.families import config, make
from tests.models.test_families import of, tokens_of
from tests.models.tiny import GREEDY, Served, llama, save

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


@pytest.mark.parametrize("impl", ["fused", "generic"])
def test_a_fine_tune_of_high_rank_is_kept_in_few_bits(
    impl: str, base: Path, tmp_path: Path
) -> None:
    small = {"rank": 60, "size": 0.03, "changed": (*EVERY, "lm_head")}
    tune = tuned(base, tmp_path / "tune", **small).float()
    made = make_delta(base, tmp_path / "tune", tmp_path / "delta", rank=8)
    assert (not made.ranks, {*made.bits.values()}) == (True, {4})
    assert len(made.bits) == 3 * len(EVERY) + 1
    assert 2.0**-11 < made.worst <= 2.0**-8
    assert 2 * made.n_bytes < made.whole_bytes
    adapters = (AdapterSettings(name="tune", path=str(tmp_path / "delta")),)
    given = {"adapters": adapters, "dtype": "float32", "model_impl": impl, "linear": "packed"}
    served = Served(base, **given)
    assert (served.host.failed, served.spec.adapters[0].rank) == ({}, 0)
    with pytest.raises(ConfigError, match="cuda:0 is a GPU: a delta in few bits is of CPUs"):
        check_room(served.spec, [], DeviceSettings(name="cuda:0", budget_bytes=512 * MiB))
    tokens, others = tokens_of(40, 1), tokens_of(23, 2)
    ours, beside, without = served.logits(
        SequenceWork("a", tokens.tolist(), 0, served.table(range(3)), GREEDY, 0),
        SequenceWork("b", others.tolist(), 0, served.table(range(3, 5)), GREEDY),
        SequenceWork("c", tokens.tolist(), 0, served.table(range(5, 8)), GREEDY),
    )
    served.close()
    plain = AutoModelForCausalLM.from_pretrained(base).float()
    alone = of(plain, tokens)
    torch.testing.assert_close(without, alone, rtol=0, atol=1e-4)
    torch.testing.assert_close(beside, of(plain, others), rtol=0, atol=1e-4)
    for module in made.bits:
        before = plain.get_submodule(module).weight.data
        before += few_bits(tune.get_submodule(module).weight.detach() - before, 4).rounded
    torch.testing.assert_close(ours, of(plain, tokens), rtol=0, atol=5e-4)
    theirs = of(tune, tokens)
    assert (ours - theirs).norm() < 0.2 * (alone - theirs).norm()


def tensor_bytes() -> int:
    """Bytes of all tensors that this process has."""
    found = [o for o in gc.get_objects() if type(o) is torch.Tensor and o.device.type == "cpu"]
    storages = [o.untyped_storage() for o in found if o.layout is torch.strided]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def test_matrices_in_few_bits_are_read_one_at_a_time(base: Path, tmp_path: Path) -> None:
    tuned(base, tmp_path / "tune", rank=60, size=0.03, changed=EVERY)
    made = make_delta(base, tmp_path / "tune", tmp_path / "delta", rank=8)
    host = load_host_model(ModelSettings(name="base", path=str(base)))
    gc.collect()
    before, held, pieces = tensor_bytes(), list[int](), itertools.count()

    def look() -> None:
        if next(pieces) % 5 == 0:
            held.append(tensor_bytes() - before)

    modules = linear_modules(host.config)
    settings = AdapterSettings(name="tune", path=str(made.path))
    adapter = load_adapter(settings, host.spec, modules, HostTier(look))
    sizes = [p.weight.n_bytes for p in adapter.packed]
    adapter.memory.close()
    host.close()
    assert len(sizes) == 3 * len(EVERY)
    assert len(held) >= 4
    assert max(held) < 2 * max(sizes) < sum(sizes) / 4


def test_matrices_of_both_kinds_and_bits_in_one_delta(base: Path, tmp_path: Path) -> None:
    tune = tuned(base, tmp_path / "first", rank=2, changed=("q_proj",))
    for name, size in (("down_proj", 0.03), ("up_proj", 0.3)):
        weight = tune.model.layers[1].get_submodule(f"mlp.{name}").weight.data
        change = torch.randn_like(weight)
        weight += change * (size * weight.norm() / change.norm())
    save(tune, tmp_path / "tune", dtype=torch.bfloat16)
    made = make_delta(base, tmp_path / "tune", tmp_path / "delta")
    mlp = "model.layers.1.mlp"
    assert made.bits == {f"{mlp}.down_proj": 4, f"{mlp}.up_proj": 8}
    assert {m.rpartition(".")[2] for m in made.ranks} == {"q_proj"}
    tier = HostTier()
    adapters = (AdapterSettings(name="tune", path=str(made.path)),)
    host = load_host_model(ModelSettings(name="base", path=str(base), adapters=adapters), tier)
    assert not host.failed
    kept = {p.module: p.weight.form for p in host.adapters[0].packed}
    assert kept == {f"{mlp}.up_proj": "INT8-BF16:32", f"{mlp}.down_proj": "INT4-BF16:32"}
    host.close()
    near, alone = delta_divergence(base, tmp_path / "tune", made.path)
    assert near.nats < alone.nats / 20


def test_tensors_that_do_not_fit_the_base_are_refused(base: Path, tmp_path: Path) -> None:
    tuned(base, tmp_path / "tune", rank=60, changed=("q_proj",))
    make_delta(base, tmp_path / "tune", tmp_path / "delta", rank=8)
    file = tmp_path / "delta" / "adapter_model.safetensors"
    good = load_file(file)
    stem = "base_model.model.model.layers.1.self_attn.q_proj.weight"
    adapters = (AdapterSettings(name="d", path=str(tmp_path / "delta")),)
    settings = ModelSettings(name="base", path=str(base), adapters=adapters)

    def failing(match: str, **changed: torch.Tensor) -> None:
        new = {f"{stem}_{part}": tensor for part, tensor in changed.items()}
        save_file({**good, **new}, file)
        host = load_host_model(settings)
        assert re.search(match, host.failed["d"]), host.failed
        host.close()

    bad = good[f"{stem}_scale"].clone()
    bad[3, 1] = float("nan")
    failing("q_proj.weight.*NaN or infinite", scale=bad)
    failing("q_proj.weight.*scales are not those", scale=bad[:5])
    failing("not a LoRA matrix", zero_point=torch.zeros(16, 4, dtype=torch.int32))
    config = json.loads((tmp_path / "delta" / "adapter_config.json").read_text())
    config["peft_type"] = "LORA"
    (tmp_path / "delta" / "adapter_config.json").write_text(json.dumps(config))
    failing("not a LoRA matrix")


def test_what_is_no_delta_is_refused_by_name(base: Path, tmp_path: Path) -> None:
    def refused(tune: Path, match: str, **more: Any) -> None:
        with pytest.raises(BallastError, match=match):
            make_delta(base, tune, tmp_path / "delta", **more)
        assert not (tmp_path / "delta").exists()

    refused(base, "there is nothing to keep")
    small = {"hidden_size": 128, "intermediate_size": 192, "vocab_size": 64}
    llama(tmp_path / "small", dtype=torch.bfloat16, **small)
    tuned(tmp_path / "small", tmp_path / "high", rank=60, size=0.3, changed=EVERY)
    with pytest.raises(BallastError, match=r"takes 5.% of its bytes, more than half"):
        make_delta(tmp_path / "small", tmp_path / "high", tmp_path / "delta")
    tuned(base, tmp_path / "other weights", rank=60, size=3.0)
    above = r"down_proj.weight: .* a rank above 8, and needs more than 8 bits: raise --rank"
    refused(tmp_path / "other weights", above, rank=8)
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
