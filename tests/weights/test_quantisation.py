"""Quantised safetensors: what `transformers` computes from the weights as dequantised, packed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from ballast.core.errors import CheckpointError, UnsupportedModel
from ballast.core.job import SequenceWork
from ballast.kernels.panel_forms import form_of_name
from ballast.weights.packing import words_on_forms
from ballast.weights.stored import find_tensors, quantised_types, served_bytes
from benchmarks.quantised_files import FORMATS, quantise, quantise_experts
from tests.models.tiny import GREEDY, Served

SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
    "vocab_size": 331,
    "initializer_range": 0.25,
}
PACKED = {"model_impl": "auto", "linear": "auto"}


def make(path: Path, name: str, kind: str = "llama", **more: Any) -> Any:
    """Write a quantised model; returns `transformers`' with the dequantised weights."""
    torch.manual_seed(1)
    config = transformers.CONFIG_MAPPING[kind](**SIZES, **more)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    quantise(model, path, name)
    return model


def compare(path: Path, model: Any, **settings: Any) -> Served:
    tokens = torch.randint(0, 331, (40,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs = model(tokens[None], use_cache=False).logits[0, -1]
    served = Served(path, dtype="float32", **settings)
    try:
        ours = served.logits(
            SequenceWork("a", tokens.tolist(), 0, served.table([4, 0, 9, 6]), GREEDY)
        )[0]
    finally:
        served.close()
    assert theirs.std() > 0.05  # or nothing would have been tested
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-4)
    return served


@pytest.mark.parametrize("name", FORMATS)
def test_stays_packed(name: str, tmp_path: Path) -> None:
    model = make(tmp_path, name)
    served = compare(tmp_path, model, **PACKED)
    assert served.host.fused
    assert served.spec.parameters == sum(p.numel() for p in model.parameters())
    types = quantised_types(find_tensors(tmp_path).values())
    assert served.spec.stored_in in {kind for kind, _ in types}
    matrices = [t for s in served.host.segments[1:-1] for t in s.tensors if len(t.shape) == 2]
    assert all(t.form for t in matrices)
    bits = max(form_of_name(t.form).bits for t in matrices)
    plain = sum(t.shape[0] * t.shape[1] for t in matrices)
    panels = 8 * 128 / (128 + 192) if bits == 4 else 8  # padded: 192 rows of gate and up are not
    assert sum(t.n_bytes for t in matrices) < plain * (bits / 8 + panels / 8)
    assert 0.9 < sum(served.spec.segment_bytes) / served_bytes(tmp_path, "float32") < 1.25


@pytest.mark.parametrize("name", ["gptq-order", "ct-int4-zeros", "fp8-block", "bnb-nf4-nested"])
def test_is_dequantised_for_other_kernels(name: str, tmp_path: Path) -> None:
    served = compare(tmp_path, make(tmp_path, name))
    assert not any(t.form for s in served.host.segments for t in s.tensors)


@pytest.mark.parametrize("impl", ["fused", "generic"])
@pytest.mark.parametrize("format_", ["gptq", "gptq-order", "fp8-block"])
def test_experts(format_: str, impl: str, tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    torch.manual_seed(1)
    config = transformers.Qwen3MoeConfig(**SIZES, head_dim=32, **experts)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    modules = {}
    for i, layer in enumerate(model.model.layers):  # as checkpoints have them: one by one
        for e in range(4):
            gate, up = layer.mlp.experts.gate_up_proj.data[e].chunk(2)
            down = layer.mlp.experts.down_proj.data[e]
            for name, weight in (("gate", gate), ("up", up), ("down", down)):
                modules[f"model.layers.{i}.mlp.experts.{e}.{name}_proj"] = weight
    found = quantise(model, tmp_path, format_, matrices=modules)
    for i, layer in enumerate(model.model.layers):
        for e in range(4):
            stem = f"model.layers.{i}.mlp.experts.{e}"
            parts = [found[f"{stem}.{name}_proj"] for name in ("gate", "up")]
            layer.mlp.experts.gate_up_proj.data[e] = torch.cat(parts)
            layer.mlp.experts.down_proj.data[e] = found[f"{stem}.down_proj"]
    served = compare(tmp_path, model, model_impl=impl, linear="packed")
    layer = served.host.segments[1].tensors
    kept = {t.names[0] for t in layer if t.form.startswith(("INT4Z", "FP8"))}
    names = {"qkv", "o", "experts.gate_up", "experts.down"}
    if impl == "generic":
        names = {f"model.layers.0.mlp.experts.{m}_proj" for m in ("gate_up", "down")}
    assert kept >= names


def test_inputs_in_several_orders_are_in_parts(tmp_path: Path) -> None:
    model = make(tmp_path, "gptq-order")
    stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.v_proj"
    _, function = FORMATS["gptq"]
    parts, weight = function(model.model.layers[0].self_attn.v_proj.weight.data)
    stored |= {name + suffix: part.contiguous() for suffix, part in parts.items()}
    model.model.layers[0].self_attn.v_proj.weight.data = weight
    safetensors.torch.save_file(stored, tmp_path / "model.safetensors")
    served = compare(tmp_path, model, **PACKED)
    forms = {t.names[0]: t.form for t in served.host.segments[1].tensors if t.form}
    assert {"qkv.0", "qkv.1", "qkv.2", "o", "gate_up", "down"} == set(forms)
    assert forms["qkv.0"] == forms["qkv.1"] != forms["qkv.2"]


def set_config(path: Path, **values: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": values}))


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"quant_method": "aqlm"}, "aqlm"),
        ({"quant_method": "hqq"}, "hqq"),
        ({"quant_method": "awq", "version": "gemv"}, "awq gemv"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "gptq marlin"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt"),
        (
            {"quant_method": "compressed-tensors", "format": "marlin-24"},
            "compressed-tensors marlin-24",
        ),
        ({"quant_algo": "W4A8"}, "w4a8"),
        ({"bits": 4}, "an unnamed method"),
    ],
)
def test_other_methods_are_refused_by_name(
    values: dict[str, Any], name: str, tmp_path: Path
) -> None:
    make(tmp_path, "gptq")
    set_config(tmp_path, **values)
    with pytest.raises(UnsupportedModel, match=rf"quantised \({name}"):
        Served(tmp_path)


def test_weights_that_should_be_quantised_and_are_not(tmp_path: Path) -> None:
    make(tmp_path, "gptq")
    set_config(tmp_path, quant_method="fp8")
    with pytest.raises(CheckpointError, match=r"quantised \(fp8\), and none of them is"):
        Served(tmp_path)


def change(path: Path, name: str, function: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    stored = safetensors.torch.load_file(path / "model.safetensors")
    changed = function(stored.pop(name))
    if changed is not None:
        stored[name] = changed.contiguous()
    safetensors.torch.save_file(stored, path / "model.safetensors")


STEM = "model.layers.0.self_attn.q_proj."


@pytest.mark.parametrize(
    ("format_", "part", "function", "reason"),
    [
        ("gptq", "scales", lambda t: None, "scales is missing"),
        ("gptq", "qzeros", lambda t: t[:, :5], "do not fit zeros"),
        ("gptq", "g_idx", lambda t: t * 0, "groups are not of 32"),
        ("gptq", "g_idx", lambda t: t - 1, "names no groups"),
        ("gptq", "scales", lambda t: t * float("inf"), "inf at"),
        ("awq", "qweight", lambda t: t[:, :4], "do not fit scales"),
        ("ct-int4", "weight_shape", lambda t: t + 64, "not those of a matrix"),
        ("ct-int4", "weight_scale", lambda t: t.double(), "F64 are not among"),
        ("ct-int8", "weight_scale", lambda t: t[:7], "are not those of a matrix"),
        ("ct-int8", "weight_scale", lambda t: None, "dtype I8 is not one of"),
        ("fp8-block", "weight", lambda t: (t.view(torch.uint8) | 127).view(t.dtype), "NaN at"),
        ("bnb-nf4", "weight.absmax", lambda t: t[:-1], "rows of whole blocks"),
        ("bnb-nf4", "weight.quant_map", lambda t: t * 2, "values are not those"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    format_: str, part: str, function: Any, reason: str, tmp_path: Path
) -> None:
    make(tmp_path, format_)
    change(tmp_path, STEM + part, function)
    with pytest.raises(CheckpointError, match=rf"(?s)q_proj.*{reason}"):
        Served(tmp_path, dtype="float32", **PACKED)


def test_types_are_told(tmp_path: Path) -> None:
    make(tmp_path, "awq")
    types = quantised_types(find_tensors(tmp_path).values())
    assert types == {("AWQ int4", "INT4Z-F16:32")}
    assert words_on_forms([], types, "bfloat16") == "AWQ int4 are dequantised to bfloat16 at load"


def gpt_oss(path: Path) -> Any:
    torch.manual_seed(1)
    sizes = {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = transformers.GptOssConfig(**{**SIZES, **sizes})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, tensor in model.named_parameters():
        if "bias" in name:
            tensor.data.normal_(0, 0.1)
    quantise_experts(model, path)
    return model


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    served = compare(tmp_path, gpt_oss(tmp_path), linear="auto")
    packed = {t.names[0].rpartition(".")[2]: t for t in served.host.segments[1].tensors if t.form}
    assert {name: t.form for name, t in packed.items()} == {
        "gate_up_proj": "MXFP4",
        "down_proj": "MXFP4",
    }
    plain = {"gate_up_proj": 4 * 128 * 384, "down_proj": 4 * 192 * 128}
    assert {name: t.n_bytes for name, t in packed.items()} == {
        name: n * 17 // 32
        for name, n in plain.items()  # 4 bits, and 8 for 32 of them
    }
    types = quantised_types(find_tensors(tmp_path).values())
    assert types == {("MXFP4", "MXFP4")}
    words = words_on_forms(served.host.segments, types, "float32")
    assert words == "MXFP4 stay packed in memory"
    in_memory = sum(served.spec.segment_bytes)  # the head's last panel is padded
    assert 1 < in_memory / served_bytes(tmp_path, "float32") < 1.05


def test_experts_in_mxfp4_generate_what_transformers_does(tmp_path: Path) -> None:
    model = gpt_oss(tmp_path)
    draw = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, 331, (n,), generator=draw).tolist() for n in (37, 1, 20)]
    served = Served(tmp_path, dtype="float32", linear="auto")
    found = served.generate(prompts, 12, chunk=16)
    served.close()
    for prompt, tokens in zip(prompts, found, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[0]
        best = logits[len(prompt) - 1 :].topk(2)
        assert float((best.values[:, 0] - best.values[:, 1]).min()) > 1e-3  # no ties
        assert tokens == best.indices[:, 0].tolist()


def test_experts_in_mxfp4_are_dequantised_for_other_kernels(tmp_path: Path) -> None:
    served = compare(tmp_path, gpt_oss(tmp_path))
    assert not any(t.form for s in served.host.segments for t in s.tensors)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda t: t | 255, r"gate_up_proj\[0\].*NaN at"),
        (lambda t: t[:, :5], "are not scales"),
    ],
)
def test_experts_in_mxfp4_that_are_broken(function: Any, reason: str, tmp_path: Path) -> None:
    gpt_oss(tmp_path)
    change(tmp_path, "model.layers.0.mlp.experts.gate_up_proj_scales", function)
    with pytest.raises(CheckpointError, match=rf"(?s){reason}"):
        Served(tmp_path, dtype="float32", linear="auto")


def test_activations_in_int8_are_an_option(tmp_path: Path) -> None:
    model = make(tmp_path, "gptq-order")
    tokens = torch.randint(0, 331, (40,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs = model(tokens[None], use_cache=False).logits[0, -1]
    served = Served(tmp_path, dtype="float32", model_impl="auto", linear="int8")
    ours = served.logits(SequenceWork("a", tokens.tolist(), 0, [4, 0, 9, 6], GREEDY))[0]
    forms = {t.form for s in served.host.segments for t in s.tensors if t.form}
    types = quantised_types(find_tensors(tmp_path).values())
    words = words_on_forms(served.host.segments, types, "float32")
    served.close()
    assert all(form.endswith("/int8") for form in forms)
    assert words == "GPTQ int4 stay packed in memory; activations are rounded to int8"
    assert 1e-4 < (ours - theirs).norm() / theirs.norm() < 0.1
