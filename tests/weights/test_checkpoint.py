"""From files to the host tier: every byte where the manifest says, every fault named."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import mmap
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ballast.core.errors import CheckpointError, ConfigError, DeviceError, UnsupportedModel
from ballast.core.settings import ModelSettings, Slo
from ballast.memory import syscalls
from ballast.memory.tensor import tensor_at
from ballast.weights import sealed
from ballast.weights import segment as segments
from ballast.weights.checkpoint import load_host_model, read_spec
from ballast.weights.host import HostModel
from tests.descriptors import open_descriptors

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
STORED: dict[str, Any] = {"model_impl": "generic", "linear": "plain"}
"""Settings with which tensors lie in memory as they were stored."""


def make(path: Path, dtype: torch.dtype = torch.float32, shard: str = "1GB", **more: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **{
            "hidden_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 96,
            "vocab_size": 131,
            "max_position_embeddings": 256,
            **more,
        }
    )
    model = transformers.LlamaForCausalLM(config).to(dtype)
    model.save_pretrained(path, max_shard_size=shard)
    return model


def load(path: Path, **settings: Any) -> HostModel:
    return load_host_model(ModelSettings(name="m", path=str(path), **{**STORED, **settings}))


def contents(host: HostModel) -> dict[str, torch.Tensor]:
    """Copies of all tensors, by every name they have."""
    found = {}
    for segment, base in zip(host.segments, host.addresses, strict=True):
        for t in segment.tensors:
            assert t.offset % 64 == 0
            assert t.offset + t.n_bytes <= segment.n_bytes
            tensor = tensor_at(base + t.offset, t.shape, DTYPES[t.dtype]).clone()
            found.update(dict.fromkeys(t.names, tensor))
    return found


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard", ["1GB", "40KB"])
def test_every_tensor_arrives(tmp_path: Path, tied: bool, shard: str) -> None:
    model = make(tmp_path, tie_word_embeddings=tied, shard=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "40KB")
    host = load(tmp_path, slo=Slo(ttft=9.0), max_running=3, share=2.0, priority=1, pinned=True)
    found = contents(host)
    expected = model.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    names = [s.name for s in host.segments]
    assert names == ["embeddings", "layer 0", "layer 1", *([] if tied else ["head"])]
    spec = host.spec
    assert spec.segment_bytes == tuple(s.n_bytes for s in host.segments)
    assert all(a % mmap.PAGESIZE == 0 for a in host.addresses)
    assert host.segments[1].n_bytes == host.segments[2].n_bytes
    parameters = 4 * sum(p.numel() for p in model.parameters())
    assert parameters <= spec.weight_bytes < parameters + 64 * len(expected)
    assert (spec.n_layers, spec.n_heads, spec.kv_heads, spec.head_dim) == (2, 4, 2, 12)
    assert (spec.hidden, spec.intermediate, spec.vocab) == (48, 96, 131)
    assert (spec.slo.ttft, spec.max_running, spec.share, spec.priority) == (9.0, 3, 2.0, 1)
    assert spec.pinned
    host.close()
    host.close()


def test_headers_tell_the_spec(tmp_path: Path) -> None:
    """All but what only bytes can tell, and before they are there."""
    make(tmp_path, dtype=torch.bfloat16)
    settings = ModelSettings(name="m", path=str(tmp_path), slo=Slo(ttft=9.0), max_model_len=99)
    host = load_host_model(settings)
    of_bytes: dict[str, Any] = {"fingerprint": "", "segment_digests": ()}
    result = read_spec(settings)
    assert dataclasses.replace(result, **of_bytes) == dataclasses.replace(host.spec, **of_bytes)
    assert result.segment_digests == ()
    host.close()
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="safetensors"):
        read_spec(settings)


def test_large_tensors_go_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(tmp_path)
    whole = load(tmp_path, dtype="bfloat16")
    monkeypatch.setattr(segments, "PIECE_BYTES", 4096)
    pieces = load(tmp_path, dtype="bfloat16")
    for name, tensor in model.state_dict().items():
        assert torch.equal(contents(pieces)[name], tensor.to(torch.bfloat16))
        assert torch.equal(contents(whole)[name], tensor.to(torch.bfloat16))
    whole.close()
    pieces.close()


@pytest.mark.parametrize(
    ("stored", "asked", "served"),
    [
        (torch.float32, "auto", "float32"),
        (torch.bfloat16, "auto", "bfloat16"),
        (torch.float16, "auto", "float32"),
        (torch.float16, "bfloat16", "bfloat16"),
        (torch.bfloat16, "float32", "float32"),
        (torch.float32, "bfloat16", "bfloat16"),
    ],
)
def test_dtypes(tmp_path: Path, stored: torch.dtype, asked: str, served: str) -> None:
    model = make(tmp_path, stored)
    host = load(tmp_path, dtype=asked)
    assert host.spec.dtype == served
    for name, tensor in model.state_dict().items():
        assert torch.equal(contents(host)[name], tensor.to(DTYPES[served]))
    host.close()


def test_the_tier_is_sealed_and_the_files_are_free(tmp_path: Path) -> None:
    make(tmp_path)
    before = open_descriptors()
    host = load(tmp_path)
    assert len(open_descriptors() - before) == len(host.segments)
    with pytest.raises(OSError):
        os.pwrite(host.memory.files()[0], b"x", 0)
    with pytest.raises(OSError):
        os.ftruncate(host.memory.files()[0], 0)
    maps = Path("/proc/self/maps").read_text()
    assert str(tmp_path) not in maps
    (line,) = (x for x in maps.splitlines() if f"{host.addresses[0]:x}-" in x)
    assert "r--s" in line
    assert "ballast-m" in line
    expected = contents(host)
    for file in tmp_path.glob("*.safetensors"):
        file.write_bytes(b"")  # under a mapping of it this would end the process
    assert all(torch.equal(contents(host)[k], v) for k, v in expected.items())
    host.close()
    assert open_descriptors() <= before


def test_fingerprint(tmp_path: Path) -> None:
    def of(path: Path, **settings: Any) -> str:
        host = load(path, **settings)
        host.close()
        return host.spec.fingerprint

    make(tmp_path / "a")
    make(tmp_path / "b", shard="40KB")
    make(tmp_path / "c", rms_norm_eps=1e-3)
    first = of(tmp_path / "a")
    assert re.fullmatch("[0-9a-f]{64}", first)
    assert of(tmp_path / "b") == first  # neither name nor shards matter
    assert of(tmp_path / "c") != first
    assert of(tmp_path / "a", dtype="bfloat16") != first
    tensors = load_file(tmp_path / "a/model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][5, 5] += 1
    save_file(tensors, tmp_path / "a/model.safetensors")
    assert of(tmp_path / "a") != first


def test_context_length_and_end_tokens(tmp_path: Path) -> None:
    make(tmp_path, eos_token_id=7)
    for asked, expected in ((None, 256), (100, 100), (9999, 256)):
        host = load(tmp_path, max_model_len=asked)
        assert host.spec.max_model_len == expected
        assert host.spec.eos_token_ids == (7,)
        host.close()
    for said, expected_ids in ((5, (5,)), ([3, 4], (3, 4)), (None, (7,))):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": said}))
        host = load(tmp_path)
        assert host.spec.eos_token_ids == expected_ids
        host.close()


@pytest.mark.parametrize("equal", [True, False])
def test_a_head_that_is_stored_although_tied(tmp_path: Path, equal: bool) -> None:
    """It is tied if both are the same, and else not: as transformers does."""
    make(tmp_path, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    embeddings = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embeddings.clone() if equal else embeddings * 2
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    reference = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    host = load(tmp_path)
    found = contents(host)
    assert torch.equal(found["lm_head.weight"], reference.lm_head.weight)
    assert torch.equal(found["model.embed_tokens.weight"], embeddings)
    assert (host.segments[-1].name == "head") == (not equal)
    host.close()


def test_only_the_head_is_stored_of_a_tied_pair(tmp_path: Path) -> None:
    make(tmp_path, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    host = load(tmp_path)
    assert torch.equal(contents(host)["model.embed_tokens.weight"], head)
    host.close()


def test_tensors_that_no_one_asked_for_are_left_alone(tmp_path: Path) -> None:
    make(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)
    tensors["odd"] = torch.ones(3, dtype=torch.float64)
    save_file(tensors, tmp_path / "model.safetensors")
    host = load(tmp_path)
    assert "odd" not in contents(host)
    host.close()


# Faults: what is done to a good checkpoint, the file and the tensor that the error names, why.

NAME = "model.layers.1.mlp.up_proj.weight"


def edit(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def do(path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors")

    return do


def header(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Rewrite the header in place, padded to its old length."""

    def do(path: Path) -> None:
        file = path / "model.safetensors"
        raw = file.read_bytes()
        (n,) = struct.unpack("<Q", raw[:8])
        result = json.loads(raw[8 : 8 + n])
        change(result)
        new = json.dumps(result, separators=(",", ":")).encode().ljust(n)
        file.write_bytes(struct.pack("<Q", len(new)) + new + raw[8 + n :])

    return do


def cut(at: float) -> Callable[[Path], None]:
    def do(path: Path) -> None:
        file = path / "model.safetensors"
        os.truncate(file, int(file.stat().st_size * at))

    return do


def write(name: str, text: bytes) -> Callable[[Path], None]:
    return lambda path: (path / name).write_bytes(text) and None


def misshape(result: dict[str, Any]) -> None:
    result[NAME]["shape"] = [3, 3]


def nonsense(result: dict[str, Any]) -> None:
    result[NAME]["data_offsets"] = [10, -4]


def no_entry(result: dict[str, Any]) -> None:
    result[NAME] = 4


FAULTS: dict[str, tuple[Callable[[Path], Any], str, str | None, str]] = {
    "no header": (write("model.safetensors", b"abc"), "model.safetensors", None, "truncated"),
    "not safetensors": (
        write("model.safetensors", b"\x89PNG\r\n\x1a\n" * 9),
        "model.safetensors",
        None,
        "not a safetensors header",
    ),
    "header is not JSON": (
        write("model.safetensors", struct.pack("<Q", 8) + b"{nothing" + b"0" * 99),
        "model.safetensors",
        None,
        "corrupt header",
    ),
    "header is a list": (
        write("model.safetensors", struct.pack("<Q", 2) + b"[]"),
        "model.safetensors",
        None,
        "corrupt header",
    ),
    "cut in the header": (cut(0.002), "model.safetensors", None, "within its header"),
    "cut in a tensor": (cut(0.9), "model.safetensors", "*", "truncated"),
    "sizes disagree": (header(misshape), "model.safetensors", NAME, "corrupt header"),
    "offsets are nonsense": (header(nonsense), "model.safetensors", NAME, "corrupt header"),
    "an entry is no entry": (header(no_entry), "model.safetensors", NAME, "corrupt header"),
    "a tensor is missing": (edit(lambda t: t.__delitem__(NAME)), "", NAME, "missing"),
    "a shape is wrong": (
        edit(lambda t: t.update({NAME: t[NAME].T.contiguous()})),
        "model.safetensors",
        NAME,
        r"\(48, 96\).*\(96, 48\)",
    ),
    "a dtype is not known": (
        edit(lambda t: t.update({NAME: t[NAME].double()})),
        "model.safetensors",
        NAME,
        "F64",
    ),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), "", None, "has neither"),
    "no config": (lambda p: (p / "config.json").unlink(), "config.json", None, "no such file"),
    "config is not JSON": (write("config.json", b"{"), "config.json", None, "JSON"),
    "config names nothing": (write("config.json", b"{}"), "config.json", None, "model_type"),
    "config makes no sense": (
        write("config.json", b'{"model_type": "llama", "hidden_size": "many"}'),
        "config.json",
        None,
        "hidden_size",
    ),
    "generation config is broken": (
        write("generation_config.json", b"no"),
        "generation_config.json",
        None,
        "JSON",
    ),
    "weights cannot be read": (
        lambda p: (
            (p / "model.safetensors").unlink(),
            (p / "model.safetensors").symlink_to(p / "nowhere"),
        ),
        "",
        None,
        "has neither",
    ),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.replace(" ", "-"))
def test_faults_name_the_file_and_the_tensor(tmp_path: Path, fault: str) -> None:
    damage, file, tensor, reason = FAULTS[fault]
    make(tmp_path)
    damage(tmp_path)
    before = open_descriptors()
    with pytest.raises(CheckpointError, match=reason) as caught:
        load(tmp_path)
    assert caught.value.file == str(tmp_path / file)
    assert caught.value.tensor == tensor or tensor == "*"
    assert open_descriptors() <= before, "others may be closed by the collector"


def test_no_such_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        load(tmp_path / "nowhere")


SHARDS: dict[str, tuple[Callable[[Path, str], Any], str, str]] = {
    "missing": (lambda p, shard: (p / shard).unlink(), "shard", "missing"),
    "empty": (lambda p, shard: (p / shard).write_bytes(b""), "shard", "truncated"),
    "without its tensor": (
        lambda p, shard: save_file({"other": torch.ones(1)}, p / shard),
        "",
        "missing",
    ),
    "elsewhere": (
        lambda p, shard: (p / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {NAME: "../x.safetensors"}})
        ),
        "../x.safetensors",
        "missing",
    ),
    "index corrupt": (
        lambda p, shard: (p / "model.safetensors.index.json").write_text("[]"),
        "model.safetensors.index.json",
        "weight_map",
    ),
}


@pytest.mark.parametrize("fault", SHARDS, ids=lambda f: f.replace(" ", "-"))
def test_faults_of_shards(tmp_path: Path, fault: str) -> None:
    damage, file, reason = SHARDS[fault]
    make(tmp_path, shard="40KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shard = index["weight_map"][NAME]
    damage(tmp_path, shard)
    with pytest.raises(CheckpointError, match=reason) as caught:
        load(tmp_path)
    assert caught.value.file == str(tmp_path / (shard if file == "shard" else file))


def test_a_file_cut_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path)
    monkeypatch.setattr(segments, "PIECE_BYTES", 4096)
    pread = os.preadv
    calls = []

    def cutting(fd: int, buffers: Any, at: int) -> int:
        calls.append(at)
        if len(calls) == 5:
            os.truncate(tmp_path / "model.safetensors", 5000)
        return pread(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", cutting)
    before = open_descriptors()
    with pytest.raises(CheckpointError, match="truncated while it was read"):
        load(tmp_path)
    assert open_descriptors() <= before, "others may be closed by the collector"


def test_host_memory_that_runs_out_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path)
    before = open_descriptors()
    real = syscalls.fallocate
    left = [3]

    def scarce(fd: int, mode: int, offset: int, n_bytes: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        real(fd, mode, offset, n_bytes)

    with monkeypatch.context() as patch:
        patch.setattr(syscalls, "fallocate", scarce)
        with pytest.raises(DeviceError, match=r"no host memory for another .* of m's weights"):
            load(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(sealed, "available", lambda: (1000, "the machine"))
        with pytest.raises(DeviceError, match="1000B are available"):
            load(tmp_path)
    assert open_descriptors() <= before, "others may be closed by the collector"
    load(tmp_path).close()


def test_unknown_architectures_and_bad_settings(tmp_path: Path) -> None:
    make(tmp_path)
    with pytest.raises(ConfigError, match="dtype"):
        load(tmp_path, dtype="float16")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "unheard_of"}))
    with pytest.raises(UnsupportedModel, match="unheard_of"):
        load(tmp_path)
    quantised = config | {"quantization_config": {"quant_method": "aqlm", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(quantised))
    with pytest.raises(UnsupportedModel, match="quantised"):
        load(tmp_path)


def test_models_are_loaded_beside_each_other(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        hosts = []
        for i in range(3):
            make(tmp_path / str(i), hidden_size=48 + 16 * i)
            hosts.append(load(tmp_path / str(i)))
            stack.callback(hosts[-1].close)
        assert len({h.spec.fingerprint for h in hosts}) == 3
        hosts[0].close()
        assert contents(hosts[1])["model.norm.weight"].shape == (64,)
        assert dataclasses.replace(hosts[1].spec, name="x").weight_bytes > 0
