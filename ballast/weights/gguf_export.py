"""Make the small files of a checkpoint from a GGUF file's header: configuration, tokenizer, and
where its tensors are, so that no other process parses the header.

    python -m ballast.weights.gguf_export FILE...

prints one JSON object: `files`, texts by name, or `error`. `ballast.fleet.gguf_entry` runs it as a
process, since the file may be anybody's: limited, and confined before it is opened.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ballast.core.errors import BallastError, CheckpointError, brief
from ballast.fleet.gguf_header import GgufHeader, GgufTensor, read_gguf
from ballast.weights.gguf_config import ROPE_FACTORS, config_values
from ballast.weights.gguf_tensors import TENSORS, gguf_tensors, tensor_entry
from ballast.weights.gguf_tokenizer import end_tokens, tokenizer_files

_MOST_FACTORS = 1 << 16


def checkpoint_files(paths: Sequence[Path]) -> dict[str, str]:
    """Return texts by the names of the files that they go to; `paths`: all parts of a split file,
    or the one file. Raises CheckpointError and UnsupportedModel."""
    headers = [read_gguf(path) for path in paths]
    values = headers[0].values
    _check_parts(headers)
    tensors = {name: tensor for header in headers for name, tensor in header.tensors.items()}
    factors = None
    for header in headers:
        if ROPE_FACTORS in header.tensors:
            factors = _factors(header.path, header.tensors[ROPE_FACTORS])
    config = config_values(values, tensors, factors)
    ends = end_tokens(values)
    config["eos_token_id"] = ends
    generation = {"eos_token_id": ends} if ends else {}
    placed = gguf_tensors(headers)
    return {
        TENSORS: json.dumps([tensor_entry(t) for t in placed.values()]),
        "config.json": json.dumps(config),
        "generation_config.json": json.dumps(generation),
        **tokenizer_files(values),
    }


def _check_parts(headers: Sequence[GgufHeader]) -> None:
    """Raise CheckpointError unless these are the parts of one file, in order."""
    for i, header in enumerate(headers):
        count, number = header.values.get("split.count", 0), header.values.get("split.no", 0)
        whole = count in (0, 1) and len(headers) == 1
        if not whole and (count != len(headers) or number != i):
            reason = (
                f"its header says part {number!r:.20} of {count!r:.20}; it is {i} of {len(headers)}"
            )
            raise CheckpointError(str(header.path), None, reason)


def _factors(path: Path, tensor: GgufTensor) -> list[float]:
    n = tensor.n_bytes // 4
    if tensor.type.name != "F32" or n > _MOST_FACTORS:
        raise CheckpointError(str(path), tensor.name, f"is {tensor.type.name} of {tensor.shape}")
    return [float(x) for x in np.fromfile(path, "<f4", n, offset=tensor.start)]


def _answer(paths: Sequence[Path]) -> dict[str, Any]:
    try:
        return {"files": checkpoint_files(paths)}
    except BallastError as error:
        return {"error": str(error)}
    except OSError as error:
        return {"error": f"{error.filename or paths[0]}: {error.strerror}"}
    except MemoryError:
        return {"error": "its header takes too much memory"}
    except Exception as error:  # noqa: BLE001 - unforeseen contents of the file
        return {"error": f"its header cannot be used: {brief(error)}"}


def _imported() -> str:
    """Import all that is needed, which a confined process cannot; returns what is missing."""
    import transformers.convert_slow_tokenizer

    try:
        from transformers.integrations.gguf import gguf_tokenizer_mapping  # noqa: F401
    except ImportError:
        return f"transformers {transformers.__version__} reads no GGUF files: 5.24 and newer do"
    return ""


def main() -> None:
    if missing := _imported():
        print(json.dumps({"error": missing}), flush=True)
        return
    from ballast.isolation.confinement import confine
    from ballast.isolation.limits import Limits

    Limits().apply()
    confine()
    print(json.dumps(_answer([Path(name) for name in sys.argv[1:]])), flush=True)


if __name__ == "__main__":
    main()
