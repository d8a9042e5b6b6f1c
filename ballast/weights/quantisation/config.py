"""Read what a checkpoint's config.json says about its quantisation, and refuse unknown methods.

Imports no PyTorch: sizes are estimated in processes without it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ballast.core.errors import UnsupportedModel

GPTQ, AWQ, SCALED, PACKED, NF4, MXFP4 = (
    "GPTQ", "AWQ", "scaled", "compressed-tensors", "bitsandbytes 4 bits", "MXFP4",
)  # fmt: skip
"""Formats of matrices, as `formats` knows them."""

_KEYS = ("quantization_config", "compression_config")
_MOST_BYTES = 16 << 20
_COMPRESSED = {
    "pack-quantized": (PACKED,),
    "int-quantized": (SCALED,),
    "float-quantized": (SCALED,),
    "naive-quantized": (SCALED,),
    "mixed-precision": (PACKED, SCALED),
}
"""Formats of matrices by the `format` of compressed-tensors."""


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How the matrices of a checkpoint may be quantised."""

    method: str
    """As config.json names it."""
    formats: tuple[str, ...]
    group: int | None = None
    """Inputs that share a scale, if stated; where they do not divide a row, its last group is
    shorter."""
    block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale, if scales are those of blocks."""
    stored_less_one: bool = False
    """Whether zero points are stored less one, as in GPTQ's first format."""


def read_quantisation(directory: Path) -> Quantisation | None:
    """Read a checkpoint's quantisation; None: its configuration states none, or cannot be read,
    which reading it as such says.

    Raises UnsupportedModel, with its name, for a method that is not known.
    """
    path = directory / "config.json"
    try:
        if path.stat().st_size > _MOST_BYTES:
            return None
        values = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    found = stated(values)
    return None if found is None else quantisation_of(found, str(values.get("model_type")))


def stated(values: Any) -> Mapping[str, Any] | None:
    """Return what the values of config.json say about the quantisation, if anything."""
    parts = [values, values.get("text_config")] if isinstance(values, dict) else []
    for part in parts:
        if isinstance(part, dict):
            for key in _KEYS:
                if isinstance(found := part.get(key), dict):
                    return found
    return None


def without(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of config.json without those about the quantisation."""
    found = {key: value for key, value in values.items() if key not in _KEYS}
    if isinstance(text := found.get("text_config"), dict):
        found["text_config"] = {key: value for key, value in text.items() if key not in _KEYS}
    return found


def quantisation_of(values: Mapping[str, Any], kind: str) -> Quantisation:
    """Return the quantisation that config.json states. Raises UnsupportedModel, with its name."""
    method = str(values.get("quant_method") or values.get("quant_algo") or "an unnamed method")
    name = method.lower().replace("_", "-")
    if name == "auto-round":
        packing = str(values.get("packing_format", ""))
        name = {"auto-round:auto-gptq": "gptq", "auto-round:auto-awq": "awq"}.get(
            packing.replace("_", "-"), f"{name} {packing}"
        )
    if name == "gptq":
        layout = str(values.get("checkpoint_format", "gptq"))
        if layout in ("gptq", "gptq_v2"):
            group = _positive(values.get("group_size"))
            return Quantisation(method, (GPTQ,), group, stored_less_one=layout == "gptq")
        name = f"gptq {layout}"
    if name == "awq":
        version = str(values.get("version", "gemm")).lower()
        if version == "gemm" and values.get("backend") in (None, "autoawq"):
            return Quantisation(method, (AWQ,), _positive(values.get("group_size")))
        name = f"awq {version} {values.get('backend') or ''}".strip()
    if name == "compressed-tensors":
        return _compressed(values, kind)
    if name in ("fp8", "fbgemm-fp8"):
        return Quantisation(method, (SCALED,), block=_block(values.get("weight_block_size")))
    if name == "modelopt" and str(values.get("quant_algo", "")).upper() == "FP8":
        return Quantisation(method, (SCALED,))
    if name == "bitsandbytes":
        return Quantisation(method, (SCALED, NF4))
    if name == "mxfp4":
        return Quantisation(method, (MXFP4,))
    raise _refusal(kind, name)


def _compressed(values: Mapping[str, Any], kind: str) -> Quantisation:
    layout = str(values.get("format"))
    if layout not in _COMPRESSED:
        raise _refusal(kind, f"compressed-tensors {layout}")
    sparsity = values.get("sparsity_config") or {}
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        raise _refusal(kind, f"compressed-tensors {sparsity['format']}")
    if values.get("transform_config"):
        raise _refusal(kind, "compressed-tensors with transforms")
    groups = values.get("config_groups")
    schemes = [g.get("weights") for g in groups.values()] if isinstance(groups, dict) else []
    found = [s for s in schemes if isinstance(s, dict)]
    blocks = {_block(s.get("block_structure")) for s in found}
    sizes = {_positive(s.get("group_size")) for s in found}
    one = len(blocks) == len(sizes) == 1
    size, block = (sizes.pop(), blocks.pop()) if one else (None, None)
    return Quantisation("compressed-tensors", _COMPRESSED[layout], size, block)


def _refusal(kind: str, name: str) -> UnsupportedModel:
    what = f"its weights are quantised ({name:.80}), which is not supported"
    return UnsupportedModel(f"{kind:.80}: {what}")


def _positive(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


def _block(value: Any) -> tuple[int, int] | None:
    if isinstance(value, list | tuple) and len(value) == 2:
        rows, columns = (_positive(n) for n in value)
        return None if rows is None or columns is None else (rows, columns)
    return None
