"""Adapters from PEFT's files: what arrives in the host tier, and what each fault is told."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ballast.core.errors import BallastError, CheckpointError, UnsupportedModel
from ballast.core.settings import AdapterSettings, ModelSettings, Slo
from ballast.memory.tensor import tensor_at
from ballast.weights.adapter import MAX_RANK, load_adapter
from ballast.weights.checkpoint import load_host_model
from ballast.weights.host import HostModel, HostTier
from ballast.weights.meta_module import linear_modules
from ballast.weights.source_files import ADAPTER_CONFIG as CONFIG
from ballast.weights.source_files import ADAPTER_TENSORS as TENSORS
from benchmarks.adapters import RandomAdapter, random_adapter
from tests.descriptors import open_descriptors
from tests.models.tiny import llama

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LAYER = "base_model.model.model.layers.0.self_attn"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    path = tmp_path_factory.mktemp("base")
    return llama(path, num_hidden_layers=2), path


@pytest.fixture
def made(base: tuple[Any, Path], tmp_path: Path) -> RandomAdapter:
    return random_adapter(base[0], tmp_path / "a", 1, rank=4, only=("q_proj", "v_proj"))


def load(base: tuple[Any, Path], *adapters: Path, **settings: Any) -> HostModel:
    named = tuple(AdapterSettings(name=p.name, path=str(p)) for p in adapters)
    settings = {"path": str(base[1]), "model_impl": "generic", **settings}
    return load_host_model(ModelSettings(name="base", adapters=named, **settings))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_matrix_arrives(base: tuple[Any, Path], tmp_path: Path, dtype: str) -> None:
    made = [
        random_adapter(
            base[0],
            tmp_path / "all",
            2,
            ranks={"o_proj": 3},
            alphas={"v_proj": 5.0, "o_proj": 6.0},
        ),
        random_adapter(base[0], tmp_path / "rs", 3, rank=9, only=("up_proj",), rs=True),
    ]
    plain = load(base, dtype=dtype)
    host = load(base, *(a.path for a in made), dtype=dtype)
    assert not host.failed
    n = len(plain.spec.segment_bytes)
    assert host.spec.segment_bytes[:n] == plain.spec.segment_bytes
    assert host.spec.segment_bytes[n:] == tuple(a.segment.n_bytes for a in host.adapters)
    assert len(host.addresses) == len(host.spec.segment_bytes)
    # The base's own cached prefixes stay valid whatever adapters there are.
    assert host.spec.fingerprint == plain.spec.fingerprint
    assert [a.rank for a in host.spec.adapters] == [8, 9]
    for ours, adapter, address in zip(host.adapters, made, host.addresses[n:], strict=True):
        stored = load_file(adapter.path / TENSORS)
        assert [d.module for d in ours.deltas] == list(adapter.deltas)
        for d in ours.deltas:
            a, b = (tensor_at(address + t.offset, t.shape, DTYPES[dtype]) for t in (d.a, d.b))
            name = f"base_model.model.{d.module}.lora"
            assert torch.equal(a, stored[f"{name}_A.weight"].to(DTYPES[dtype]))
            assert torch.equal(b.t(), stored[f"{name}_B.weight"].to(DTYPES[dtype]))
            assert (a.shape, b.shape) == ((d.rank, d.inputs), (d.rank, d.outputs))
            delta = d.scale * b.t().float() @ a.float()
            tolerance = 1e-5 if dtype == "float32" else 1e-1
            assert torch.allclose(delta, adapter.deltas[d.module], rtol=tolerance, atol=tolerance)
    scales = {d.module.rpartition(".")[2]: d.scale for d in host.adapters[0].deltas}
    assert (scales["q_proj"], scales["v_proj"], scales["o_proj"]) == (2.0, 5 / 8, 2.0)
    assert host.adapters[1].deltas[0].scale == pytest.approx(16 / 3)
    plain.close()
    host.close()


def test_fingerprints_tell_contents_scales_and_bases_apart(
    base: tuple[Any, Path], tmp_path: Path
) -> None:
    paths = [
        random_adapter(base[0], tmp_path / name, seed, alpha=alpha, strength=strength).path
        for name, seed, alpha, strength in (
            ("one", 1, 16.0, 1.0),
            ("same", 1, 16.0, 1.0),
            ("seed", 2, 16.0, 1.0),
        )
    ]
    scaled = tmp_path / "scaled"
    scaled.mkdir()
    (scaled / TENSORS).write_bytes((paths[0] / TENSORS).read_bytes())
    result = json.loads((paths[0] / CONFIG).read_text())
    (scaled / CONFIG).write_text(json.dumps({**result, "lora_alpha": 17}))
    host = load(base, *paths, scaled)
    other = load(base, *paths, dtype="bfloat16")
    one, same, seed, alpha = (a.fingerprint for a in host.spec.adapters)
    assert one == same
    assert len({one, seed, alpha, other.spec.adapters[0].fingerprint}) == 4
    host.close()
    other.close()


def test_clients_see_adapters_as_models(base: tuple[Any, Path], made: RandomAdapter) -> None:
    settings = AdapterSettings(
        name="x", path=str(made.path), slo=Slo(ttft=9.0), priority=4, max_waiting=2
    )
    host = load_host_model(ModelSettings(name="base", path=str(base[1]), adapters=(settings,)))
    spec, adapted = host.spec.served
    assert spec is host.spec
    assert (adapted.name, adapted.base, adapted.slo.ttft) == ("x", "base", 9.0)
    assert (adapted.priority, adapted.max_waiting, adapted.adapters) == (4, 2, ())
    assert adapted.fingerprint == host.spec.adapters[0].fingerprint
    assert (adapted.vocab, adapted.max_model_len) == (spec.vocab, spec.max_model_len)
    host.close()


def test_closing_gives_everything_back(base: tuple[Any, Path], made: RandomAdapter) -> None:
    before = open_descriptors()
    host = load(base, made.path)
    assert len(host.addresses) == len(host.spec.segment_bytes)
    ctypes.string_at(host.addresses[-1], 64)
    host.close()
    assert open_descriptors() <= before, "others may be closed by the collector"


def configured(**changes: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        result = json.loads((path / CONFIG).read_text())
        (path / CONFIG).write_text(json.dumps({**result, **changes}))

    return change


def stored(**changes: Tensor | None) -> Callable[[Path], None]:
    """Tensors put in place of others, or taken out, by the ends of their names."""

    def change(path: Path) -> None:
        tensors = load_file(path / TENSORS)
        for name, tensor in changes.items():
            key = f"{LAYER}.{name}".replace("__", ".")
            tensors.pop(key, None)
            if tensor is not None:
                tensors[key] = tensor
        save_file(tensors, path / TENSORS)

    return change


def without(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def written(name: str, data: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        (path / name).write_bytes(data)

    return write


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        (without(CONFIG), CheckpointError, CONFIG),
        (without(TENSORS), CheckpointError, "only safetensors are read"),
        (written(CONFIG, b"{"), CheckpointError, "not valid JSON"),
        (written(CONFIG, b"[]"), CheckpointError, "not a JSON object"),
        (written(TENSORS, b"abc"), CheckpointError, "truncated"),
        (configured(peft_type="LOHA"), UnsupportedModel, "'LOHA'; only LORA"),
        (configured(use_dora=True), UnsupportedModel, "DoRA"),
        (configured(bias="all"), UnsupportedModel, "biases of the base"),
        (configured(lora_bias=True), UnsupportedModel, "biases of its own"),
        (configured(modules_to_save=["lm_head"]), UnsupportedModel, "whole modules"),
        (configured(init_lora_weights="pissa"), UnsupportedModel, r"initialisation \(pissa\)"),
        (configured(use_dora=True, bias="all"), UnsupportedModel, "DoRA, biases"),
        (configured(r="8"), CheckpointError, "must be numbers"),
        (configured(alpha_pattern={"q_proj": None}), CheckpointError, "must be numbers"),
        (configured(rank_pattern=[1]), CheckpointError, "not JSON objects"),
        (configured(rank_pattern={"(": 4}), CheckpointError, r"pattern '\('"),
        (configured(r=5), CheckpointError, r"lora_A.weight'.*\(4, 64\).*\(5, 64\)"),
        (configured(r=0), UnsupportedModel, "rank 0"),
        (configured(r=MAX_RANK + 1), UnsupportedModel, "rank 513 of .*1 to 512"),
        (
            stored(q_proj__lora_B__weight=torch.zeros(64, 5)),
            CheckpointError,
            r"lora_B.weight'.*\(64, 5\).*\(64, 4\)",
        ),
        (
            stored(q_proj__lora_A__weight=torch.zeros(4, 64, dtype=torch.int64)),
            CheckpointError,
            "dtype I64",
        ),
        (stored(q_proj__lora_A__weight=None), CheckpointError, "q_proj.lora_A.weight.*missing"),
        (
            stored(r_proj__lora_A__weight=torch.zeros(4, 64)),
            CheckpointError,
            "no linear module 'model.layers.0.self_attn.r_proj'",
        ),
        (
            stored(q_proj__lora_magnitude_vector=torch.zeros(64)),
            CheckpointError,
            "not a LoRA matrix",
        ),
        (
            lambda path: save_file({}, path / TENSORS),
            CheckpointError,
            "no tensors",
        ),
    ],
)
def test_a_fault_is_told_and_leaves_nothing_behind(
    base: tuple[Any, Path],
    made: RandomAdapter,
    change: Callable[[Path], None],
    kind: type[BallastError],
    says: str,
) -> None:
    change(made.path)
    host = load(base)
    before = open_descriptors()
    settings = AdapterSettings(name="a", path=str(made.path))
    with pytest.raises(kind, match=says):
        load_adapter(settings, host.spec, linear_modules(host.config), HostTier())
    assert open_descriptors() <= before, "others may be closed by the collector"
    host.close()


def test_adapters_do_not_change_how_their_base_is_laid_out(
    base: tuple[Any, Path], made: RandomAdapter
) -> None:
    plain, host = load(base, model_impl="auto"), load(base, made.path, model_impl="auto")
    assert plain.fused
    assert host.fused
    assert host.segments == plain.segments
    assert host.spec.segment_digests[: len(plain.segments)] == plain.spec.segment_digests
    plain.close()
    host.close()


def test_one_fault_does_not_stop_the_others(
    base: tuple[Any, Path], made: RandomAdapter, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    host = load(base, tmp_path / "empty", made.path)
    assert [a.name for a in host.spec.adapters] == ["a"]
    assert list(host.failed) == ["empty"]
    assert CONFIG in host.failed["empty"]
    host.close()
