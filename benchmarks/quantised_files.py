"""Write copies of small checkpoints with quantised matrices, in the formats that people publish.

Each format's packing is written here once more, from its definition, and independently of how
Ballast reads it; the model that is quantised gets the dequantised weights, in float32, and is the
reference.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ballast.kernels.panel_forms import E2M1, FP4, NF4

Parts = dict[str, Tensor]
"""Tensors of a matrix, by what follows its module's name."""
Quantise = Callable[[Tensor], tuple[Parts, Tensor]]
"""Returns a matrix's tensors, and the matrix as dequantised, float32."""


def quantise(
    model: Any,
    directory: Path,
    name: str,
    *,
    leave: tuple[str, ...] = ("lm_head",),
    matrices: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Quantise the linear modules of `model`, except `leave`, and save it in a format.

    The model gets the dequantised weights. `matrices`: what else is quantised, in place of all
    tensors beside it, by the names of modules that a checkpoint has for them; returns these
    dequantised.
    """
    config, function = FORMATS[name]
    directory.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(directory)
    made: Parts = {}
    written: set[str] = set()
    more = {path: function(weight.float()) for path, weight in (matrices or {}).items()}
    for path, (parts, _) in more.items():
        made |= {path + suffix: part.contiguous() for suffix, part in parts.items()}
        written.add(path.rpartition(".")[0].rpartition(".")[0])
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and not any(part in path for part in leave):
            parts, weight = function(module.weight.data.float())
            made |= {path + suffix: part.contiguous() for suffix, part in parts.items()}
            module.weight.data = weight
            written.add(f"{path}.weight")
    for key, tensor in model.state_dict().items():
        if key not in written and key.rpartition(".")[0] not in written:
            made[key] = tensor.clone()
    save_file(made, directory / "model.safetensors", {"format": "pt"})
    written_at = directory / "config.json"
    values = json.loads(written_at.read_text())
    written_at.write_text(json.dumps(values | {"quantization_config": config}))
    return {path: weight for path, (_, weight) in more.items()}


def quantise_experts(model: Any, directory: Path) -> None:
    """Save a GPT-OSS with its experts in MXFP4; the model gets them as dequantised."""
    model.save_pretrained(directory)
    stored = load_file(directory / "model.safetensors")
    for i, layer in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(layer.mlp.experts, name)
            blocks, scales, found = mxfp4(weight.data.transpose(1, 2))
            stem = f"model.layers.{i}.mlp.experts.{name}"
            del stored[stem]
            stored |= {f"{stem}_blocks": blocks.contiguous(), f"{stem}_scales": scales.contiguous()}
            weight.data = found.transpose(1, 2).contiguous()
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    written_at = directory / "config.json"
    values = json.loads(written_at.read_text())
    written_at.write_text(json.dumps(values | {"quantization_config": {"quant_method": "mxfp4"}}))


def affine(
    weight: Tensor, bits: int, group: int, scale: torch.dtype, *, symmetric: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (codes, scales, zeros, dequantised): codes and zeros unsigned, scales of groups of
    consecutive inputs; symmetric: zeros in the middle."""
    n, k = weight.shape
    whole = weight.view(n, k // group, group)
    most = (1 << bits) - 1
    least, largest = whole.amin(2), whole.amax(2)
    if symmetric:
        scales = (whole.abs().amax(2) / (most / 2)).to(scale)
        zeros = torch.full_like(scales, (most + 1) / 2).float()
    else:
        scales = ((largest - least) / most).to(scale)
        zeros = (-least / scales.float()).round().clamp(1, most)
    codes = (whole / scales.float()[..., None] + zeros[..., None]).round().clamp(0, most)
    found = (codes - zeros[..., None]) * scales.float()[..., None]
    return codes.view(n, k).int(), scales, zeros.int(), found.view(n, k)


def stream(codes: Tensor, bits: int) -> Tensor:
    """Write numbers of so many bits one after the other into rows of int32."""
    each = codes.numpy().astype(np.uint8)[..., None] >> np.arange(bits, dtype=np.uint8) & 1
    rows = np.packbits(each.reshape(len(codes), -1), axis=1, bitorder="little")
    return torch.from_numpy(rows.view(np.int32).copy())


def gptq(bits: int, group: int, *, order: bool = False, v2: bool = False) -> Quantise:
    def function(weight: Tensor) -> tuple[Parts, Tensor]:
        k = weight.shape[1]
        each = group if group > 0 else k
        turn = torch.arange(k)
        if order:
            turn = torch.randperm(k, generator=torch.Generator().manual_seed(k))
        codes, scales, zeros, found = affine(weight[:, turn], bits, each, torch.float16)
        back = turn.argsort()
        stored = zeros if v2 else zeros - 1
        parts = {
            ".qweight": stream(codes[:, back], bits).T,
            ".qzeros": stream(stored.T, bits),
            ".scales": scales.T,
            ".g_idx": (back // each).int(),
        }
        return parts, found[:, back]

    return function


def awq(group: int) -> Quantise:
    places = [0, 2, 4, 6, 1, 3, 5, 7]

    def columns(codes: Tensor) -> Tensor:
        words = torch.zeros(codes.shape[0], codes.shape[1] // 8, dtype=torch.int64)
        for place, column in enumerate(places):
            words |= codes[:, column::8].long() << 4 * place
        return words.to(torch.uint32).view(torch.int32)

    def function(weight: Tensor) -> tuple[Parts, Tensor]:
        codes, scales, zeros, found = affine(weight, 4, group, torch.float16)
        parts = {".qweight": columns(codes.T), ".qzeros": columns(zeros.T), ".scales": scales.T}
        return parts, found

    return function


def packed(
    bits: int, group: int | None, *, symmetric: bool = True, order: bool = False
) -> Quantise:
    """compressed-tensors, in words."""

    def function(weight: Tensor) -> tuple[Parts, Tensor]:
        n, k = weight.shape
        turn = torch.arange(k)
        if order:
            turn = torch.randperm(k, generator=torch.Generator().manual_seed(k))
        each = group or k
        given = affine(weight[:, turn], bits, each, torch.bfloat16, symmetric=symmetric)
        codes, scales, zeros, found = given
        back = turn.argsort()
        parts = {
            ".weight_packed": stream(codes[:, back], bits),
            ".weight_scale": scales,
            ".weight_shape": torch.tensor([n, k]),
        }
        if not symmetric:
            parts[".weight_zero_point"] = stream(zeros.T, bits).T
        if order:
            parts[".weight_g_idx"] = (back // each).int()
        return parts, found[:, back]

    return function


def int8(*, symmetric: bool = True, group: int | None = None) -> Quantise:
    """compressed-tensors, one byte each."""

    def function(weight: Tensor) -> tuple[Parts, Tensor]:
        each = group or weight.shape[1]
        codes, scales, zeros, found = affine(weight, 8, each, torch.bfloat16, symmetric=symmetric)
        parts = {".weight": (codes - 128).to(torch.int8), ".weight_scale": scales}
        if not symmetric:
            parts[".weight_zero_point"] = (zeros - 128).to(torch.int8)
        return parts, found

    return function


def float8(
    scale_of: str, name: str = ".weight_scale", block: tuple[int, int] = (32, 32)
) -> Quantise:
    """Float8 with a scale of all, of each row, or of each block."""

    def function(weight: Tensor) -> tuple[Parts, Tensor]:
        n, k = weight.shape
        if scale_of == "all":
            scales = (weight.abs().max() / 448).view(1)
            spread = scales.expand(n, k)
        elif scale_of == "rows":
            scales = weight.abs().amax(1, keepdim=True) / 448
            spread = scales.expand(n, k)
        else:
            rows, columns = (math.ceil(s / b) for s, b in zip((n, k), block, strict=True))
            scales = torch.empty(rows, columns)
            spread = torch.empty(n, k)
            for i in range(rows):
                for j in range(columns):
                    there = slice(i * block[0], (i + 1) * block[0])
                    across = slice(j * block[1], (j + 1) * block[1])
                    scales[i, j] = weight[there, across].abs().max() / 448
                    spread[there, across] = scales[i, j]
        codes = (weight / spread).to(torch.float8_e4m3fn)
        return {".weight": codes, name: scales}, codes.float() * spread

    return function


def vectorwise(weight: Tensor) -> tuple[Parts, Tensor]:
    """bitsandbytes' int8."""
    most = weight.abs().amax(1)
    codes = (weight / most[:, None] * 127).round().to(torch.int8)
    parts = {".weight": codes, ".SCB": most, ".weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, codes.float() * most[:, None] / 127


def four_bits(kind: str, *, nested: bool = False) -> Quantise:
    """bitsandbytes' NF4 and FP4, in blocks of 64."""
    table = torch.tensor(NF4 if kind == "nf4" else FP4)

    def function(weight: Tensor) -> tuple[Parts, Tensor]:
        blocks = weight.reshape(-1, 64)
        most = blocks.abs().amax(1)
        state: dict[str, Any] = {
            "quant_type": kind,
            "blocksize": 64,
            "dtype": "bfloat16",
            "shape": list(weight.shape),
        }
        parts: Parts = {}
        if nested:
            offset = float(most.mean())
            steps = torch.linspace(-1, 1, 256)
            outer = (most - offset).abs().amax().repeat(math.ceil(len(most) / 256))
            inner = ((most - offset) / outer[0] + 1) / 2 * 255
            index = inner.round().clamp(0, 255).to(torch.uint8)
            most = steps[index.int()] * outer[0] + offset
            parts |= {".weight.nested_absmax": outer, ".weight.nested_quant_map": steps.clone()}
            state |= {"nested_blocksize": 256, "nested_offset": offset, "nested_dtype": "float32"}
        codes = (blocks[..., None] / most[:, None, None] - table).abs().argmin(2)
        flat = codes.flatten()
        raw = json.dumps(state).encode()
        parts |= {
            ".weight": (flat[::2] << 4 | flat[1::2]).to(torch.uint8)[:, None],
            ".weight.absmax": index if nested else most,
            ".weight.quant_map": table.clone(),
            f".weight.quant_state.bitsandbytes__{kind}": torch.tensor([*raw], dtype=torch.uint8),
        }
        return parts, (table[codes] * most[:, None]).view(weight.shape)

    return function


def mxfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (blocks, scales, dequantised) of matrices (experts, n, k)."""
    experts, n, k = weight.shape
    whole = weight.reshape(experts, n, k // 32, 32)
    exponents = (whole.abs().amax(3) / 6).log2().ceil().clamp(-127, 127)
    values = torch.tensor(E2M1)
    codes = (whole[..., None] / 2.0 ** exponents[..., None, None] - values).abs().argmin(4)
    found = (values[codes] * 2.0 ** exponents[..., None]).view(weight.shape)
    blocks = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return blocks, (exponents + 127).to(torch.uint8), found


def _compressed(layout: str, weights: Mapping[str, Any] = {}) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": dict(weights)}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
_BNB = {"quant_method": "bitsandbytes"}
FORMATS: dict[str, tuple[dict[str, Any], Quantise]] = {
    "gptq": (_GPTQ, gptq(4, 32)),
    "gptq-order": ({**_GPTQ, "desc_act": True}, gptq(4, 32, order=True)),
    "gptq-v2": ({**_GPTQ, "checkpoint_format": "gptq_v2"}, gptq(4, 64, v2=True)),
    "gptq-8": ({**_GPTQ, "bits": 8, "group_size": -1}, gptq(8, -1)),
    "gptq-3": ({**_GPTQ, "bits": 3}, gptq(3, 32)),
    "awq": ({"quant_method": "awq", "bits": 4, "version": "gemm"}, awq(32)),
    "ct-int4": (_compressed("pack-quantized", {"group_size": 32}), packed(4, 32)),
    "ct-int4-zeros": (_compressed("pack-quantized"), packed(4, 32, symmetric=False)),
    "ct-int4-order": (_compressed("pack-quantized"), packed(4, 32, order=True)),
    "ct-int4-rows": (_compressed("pack-quantized"), packed(4, None)),
    "ct-packed-int8": (_compressed("pack-quantized"), packed(8, 64)),
    "ct-int8": (_compressed("int-quantized"), int8()),
    "ct-int8-zeros": (_compressed("int-quantized"), int8(symmetric=False, group=64)),
    "ct-fp8": (_compressed("float-quantized"), float8("rows")),
    "fp8-tensor": ({"quant_method": "fp8"}, float8("all")),
    "fp8-block": (
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
        float8("blocks", ".weight_scale_inv"),
    ),
    "fbgemm-fp8": ({"quant_method": "fbgemm_fp8"}, float8("rows")),
    "bnb-int8": ({**_BNB, "load_in_8bit": True}, vectorwise),
    "bnb-nf4": ({**_BNB, "load_in_4bit": True}, four_bits("nf4")),
    "bnb-nf4-nested": ({**_BNB, "load_in_4bit": True}, four_bits("nf4", nested=True)),
    "bnb-fp4": ({**_BNB, "load_in_4bit": True}, four_bits("fp4")),
}
"""Quantisation as config.json states it, and how a matrix is quantised, by name."""
MXFP4 = "mxfp4"
"""What `quantise_experts` writes."""
