"""Read a checkpoint's `config.json`, and its end-of-sequence tokens."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ballast.core.errors import CheckpointError, UnsupportedModel, brief
from ballast.weights.quantisation.config import without

CONFIG = "config.json"
GENERATION = "generation_config.json"
_MOST_BYTES = 16 << 20
"""Most bytes of a JSON file that is read; the largest known have some 100 kB."""


def read_config(directory: Path) -> dict[str, Any]:
    """Read the values of config.json, for `config_of`, without those about the quantisation, which
    finding tensors (`ballast.weights.stored`) reads.

    Raises CheckpointError for a file that cannot be read, and UnsupportedModel for a `model_type`
    that `transformers` does not know. Code that comes with a checkpoint is never run.
    """
    import transformers  # here, as in `config_of`: its import takes a second
    from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

    path = directory / CONFIG
    if not path.is_file():
        raise CheckpointError(str(path), None, "there is no such file")
    values = read_json(path)
    kind = values.get("model_type")
    if not isinstance(kind, str):
        raise CheckpointError(str(path), None, "it names no model_type")
    if kind not in CONFIG_MAPPING:
        if "auto_map" in values:
            why = "its code comes with the checkpoint, and such code is never run"
        else:
            why = f"transformers {transformers.__version__} knows no such model"
        raise UnsupportedModel(f"{kind}: {why}")
    try:
        # It also converts values of older versions, `model_type` among them.
        found = AutoConfig.from_pretrained(
            str(directory), trust_remote_code=False, local_files_only=True
        )
        values, _ = PreTrainedConfig.get_config_dict(str(directory), local_files_only=True)
    except Exception as error:  # the configuration's class may raise anything
        raise CheckpointError(str(path), None, brief(error)) from error
    return {**without(values), "model_type": found.model_type}


def config_of(values: Mapping[str, Any], *, untied: bool = False) -> Any:
    """Make the configuration with these values; `untied`: its head has weights of its own."""
    from transformers import CONFIG_MAPPING

    kind = values["model_type"]
    config = CONFIG_MAPPING[kind].from_dict(copy.deepcopy(dict(values)))
    if untied:
        for part in (config, config.get_text_config()):
            part.tie_word_embeddings = False
    return config


def tied(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with the embedding as the output head."""
    found = {**values, "tie_word_embeddings": True}
    if isinstance(text := values.get("text_config"), dict):
        found["text_config"] = {**text, "tie_word_embeddings": True}
    return found


def text_config(config: Any) -> Any:
    """Return the part that describes the text decoder: often the configuration itself.

    Raises UnsupportedModel where there are several.
    """
    try:
        return config.get_text_config()
    except ValueError as error:
        raise UnsupportedModel(f"{config.model_type}: it has several models of text") from error


def check_layers(config: Any, directory: Path, tensors: int) -> None:
    """Raise CheckpointError for a number of layers that files with `tensors` tensors cannot have:
    building them could take unlimited memory."""
    layers = getattr(text_config(config), "num_hidden_layers", None)
    if layers is None or (type(layers) is int and 1 <= layers <= tensors):
        return
    reason = f"num_hidden_layers is {layers!r:.40}, and the files hold {tensors} tensors"
    raise CheckpointError(str(directory / CONFIG), None, reason)


def end_tokens(directory: Path, config: Any, vocab: int) -> tuple[int, ...]:
    """Read the end-of-sequence tokens from generation_config.json, or else from config.json.

    Those that the vocabulary lacks are left out: no output has them. Raises CheckpointError for
    what is neither a token nor a list of tokens.
    """
    path = directory / GENERATION
    found = read_json(path).get("eos_token_id") if path.is_file() else None
    if found is None:
        path = directory / CONFIG
        found = getattr(config.get_text_config(), "eos_token_id", None)
    if found is None:
        return ()
    tokens = found if isinstance(found, list) else [found]
    if not all(type(token) is int for token in tokens):
        reason = f"eos_token_id is {found!r:.40}, not a token or a list of tokens"
        raise CheckpointError(str(path), None, reason)
    return tuple(token for token in tokens if 0 <= token < vocab)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises CheckpointError for a file that holds none."""
    if path.stat().st_size > _MOST_BYTES:
        raise CheckpointError(str(path), None, f"larger than {_MOST_BYTES} bytes")
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise CheckpointError(str(path), None, f"not valid JSON: {error}") from error
    except RecursionError as error:
        raise CheckpointError(str(path), None, "its JSON is nested too deeply") from error
    if not isinstance(found, dict):
        raise CheckpointError(str(path), None, "not a JSON object")
    return found
