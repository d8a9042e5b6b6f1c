"""Suggest the fleet file's key for a misplaced key, or for one of vLLM, SGLang or llama.cpp.

Used for the error texts of the fleet file and of HTTP requests.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Any, get_args

from pydantic import BaseModel

from ballast.fleet.schema import FleetKeys

_CONTEXT, _RUNNING = "models[i].limits.context", "models[i].limits.running"
_BUDGET = "devices[i].budget"
KEYS = {
    "max_model_len": _CONTEXT,
    "max_seq_len": _CONTEXT,
    "max_context": _CONTEXT,
    "context_length": _CONTEXT,
    "ctx_size": _CONTEXT,
    "num_ctx": _CONTEXT,
    "n_ctx": _CONTEXT,
    "max_num_seqs": _RUNNING,
    "max_running_requests": _RUNNING,
    "max_batch_size": _RUNNING,
    "num_parallel": _RUNNING,
    "max_queued_requests": "models[i].limits.waiting",
    "block_size": "models[i].block_tokens",
    "tool_call_parser": "models[i].tool_parser",
    "torch_dtype": "models[i].dtype",
    "kv_cache_dtype": "models[i].kv_dtype",
    "cache_type_k": "models[i].kv_dtype",
    "cache_type_v": "models[i].kv_dtype",
    "served_model_name": "models[i].name",
    "model_path": "models[i].path",
    "checkpoint": "models[i].path",
    "keep_loaded": "models[i].pinned",
    "keep_alive": "models[i].ttl",
    "idle_timeout": "models[i].ttl",
    "unload_after": "models[i].ttl",
    "gpu_memory_utilization": _BUDGET,
    "mem_fraction_static": _BUDGET,
    "kv_cache_memory_bytes": _BUDGET,
    "memory": _BUDGET,
    "max_num_batched_tokens": "devices[i].step_tokens",
    "chunked_prefill_size": "devices[i].step_tokens",
    "enable_prefix_caching": "devices[i].prefix_cache",
    "tensor_parallel_size": "devices[i].tensor_parallel",
    "tp_size": "devices[i].tensor_parallel",
    "api_key": "server.keys[i].key",
    "api_keys": "server.keys",
    "max_body": "server.most_body",
    "max_connections": "server.most_connections",
}
"""Paths in the fleet file, by what vLLM, SGLang, llama.cpp and Ollama call the same."""
OTHERS = {
    "lora_modules": "an entry of `models` with `adapter` and `base`",
    "lora_paths": "an entry of `models` with `adapter` and `base`",
    "loras": "an entry of `models` with `adapter` and `base`",
    "host": "an option: `ballast serve --host`",
    "port": "an option: `ballast serve --port`",
    "log_level": "an option: `ballast serve --log-level`",
}
"""Hints, by such a name, for settings without a single key in the fleet file."""


def place_of(word: str) -> str | None:
    """Return the key or hint that an unknown key stands for; None if there is none, or several."""
    name = word.strip().lower().replace("-", "_")
    if name in OTHERS:
        return OTHERS[name]
    found = [KEYS[name]] if name in KEYS else _paths().get(_singular(name), [])
    return f"`{found[0]}`" if len(found) == 1 else None


@functools.cache
def _paths() -> dict[str, list[str]]:
    """Each key of the fleet file in the singular, with the places where it stands, in either
    number; `defaults` repeat what models have."""
    found: dict[str, list[str]] = {}
    for path in paths_of(FleetKeys):
        if not path.startswith("defaults."):
            found.setdefault(_singular(path.rpartition(".")[2]), []).append(path)
    return found


def _singular(name: str) -> str:
    """Return a key without its plural's ending: who writes `device` may mean `devices`."""
    return name.removesuffix("s")


def paths_of(form: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """All keys that `form` describes, as errors write them: ``models[i].slo.ttft``."""
    for name, field in form.model_fields.items():
        path = f"{prefix}{name}"
        yield path
        listed, inner = _inner(field.annotation)
        if inner is not None:
            yield from paths_of(inner, f"{path}[i]." if listed else f"{path}.")


def _inner(kind: Any) -> tuple[bool, type[BaseModel] | None]:
    """(whether it is a list, the mapping that a value of this type is or holds)."""
    if isinstance(kind, UnionType):
        kind = next(k for k in get_args(kind) if k is not NoneType)
    arguments = get_args(kind)
    inner = arguments[0] if arguments else kind
    is_mapping = isinstance(inner, type) and issubclass(inner, BaseModel)
    return bool(arguments), inner if is_mapping else None
