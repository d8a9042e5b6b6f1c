"""Describe models as Ollama's clients list and show them."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ballast.core.errors import BallastError
from ballast.core.model import ModelSpec
from ballast.core.settings import FleetSettings
from ballast.fleet.gguf_header import BLOCK_PREFIX
from ballast.server.ollama_api.records import ModelDetails, ShownModel, TaggedModel
from ballast.server.text.tokenizer import Tokenizer
from ballast.weights.config import CONFIG, read_json

NEVER = datetime(9999, 12, 31, tzinfo=UTC).isoformat().replace("+00:00", "Z")
"""Time at which a model goes that only a shortage of memory evicts."""
_LEVELS = {"float32": ("F32", 4), "bfloat16": ("BF16", 2)}
"""Name of a dtype, and bytes of an element."""
_NAMES = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}
"""Sampling defaults whose names are others in Ollama."""


def details(spec: ModelSpec, family: str) -> ModelDetails:
    """Describe a model: its files' format and type, and how many parameters it has."""
    level = spec.stored_in.removeprefix(BLOCK_PREFIX)
    return ModelDetails(
        parent_model=spec.base or "",
        format="safetensors" if level == spec.stored_in else "gguf",
        family=family,
        families=[family] if family else [],
        parameter_size=_in_words(parameters(spec)),
        quantization_level=level or _LEVELS.get(spec.dtype, (spec.dtype, 2))[0],
    )


def parameters(spec: ModelSpec) -> int:
    """Return the number of a model's parameters; where it is unknown, from the bytes they take."""
    if spec.parameters:
        return spec.parameters
    _, each = _LEVELS.get(spec.dtype, ("", 2))
    return sum(spec.segment_bytes) // each


def tagged(spec: ModelSpec, family: str, name: str, modified_at: str) -> TaggedModel:
    """Describe a model for `/api/tags`, by one of its names."""
    return TaggedModel(
        name, name, modified_at, sum(spec.segment_bytes), spec.fingerprint, details(spec, family)
    )


def shown(spec: ModelSpec, family: str, tokenizer: Tokenizer, modified_at: str) -> ShownModel:
    """Describe a model for `/api/show`."""
    can = {
        "completion": spec.generates,
        "embedding": spec.embeds,
        "tools": spec.generates and tokenizer.dialect is not None,
    }
    info: dict[str, Any] = {
        "general.architecture": family,
        "general.parameter_count": parameters(spec),
        f"{family}.block_count": spec.n_layers,
        f"{family}.context_length": spec.max_model_len,
        f"{family}.embedding_length": spec.hidden,
        f"{family}.attention.head_count": spec.n_heads,
        f"{family}.attention.head_count_kv": spec.kv_heads,
    }
    return ShownModel(
        modelfile=f"FROM {spec.name}",
        parameters=_parameters(spec, tokenizer),
        template=tokenizer.chat.text,
        details=details(spec, family),
        model_info=info,
        capabilities=[name for name, able in can.items() if able],
        modified_at=modified_at,
    )


def _parameters(spec: ModelSpec, tokenizer: Tokenizer) -> str:
    """List what requests get that do not choose, a line each, as Ollama's `parameters` do."""
    stops = [f'stop "{token}"' for token in tokenizer.spelled(spec.eos_token_ids)]
    own = asdict(spec.sampling)
    named = [f"{_NAMES.get(n, n)} {value}" for n, value in own.items() if value is not None]
    return "\n".join([*stops, *named])


def family_of(fleet: FleetSettings, model: str) -> str:
    """Return the `model_type` of a model's configuration; empty where it cannot be read now."""
    path = next((m.path for m in fleet.models if m.name == model), None)
    if path is None:
        return ""
    try:
        found = read_json(Path(path) / CONFIG).get("model_type")
    except (BallastError, OSError):
        return ""
    return found if isinstance(found, str) else ""


def _in_words(count: int) -> str:
    """``135_000_000 -> '135M'``."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)
