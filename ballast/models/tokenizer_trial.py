"""Load and try a tokenizer in a limited child process, before the server loads it itself.

A tokenizer's files are parsed by native code, which may take unlimited memory or time, or end the
process (`ballast.isolation`). Ordinary faults are ignored here: the server reports them when it
loads the tokenizer. Chat templates are programs that run for each request and not at load: the
server renders them in child processes of its own.
"""

from __future__ import annotations

from pathlib import Path
from types import NoneType

from ballast.core.errors import CheckpointError, LimitExceeded
from ballast.isolation.calls import Isolation

SAMPLE = "Hello, world! 123 äß 你好\n"


def vet_tokenizer(directory: Path, isolation: Isolation) -> None:
    """Try to load and use a checkpoint's tokenizer in isolation.

    Raises CheckpointError if loading it would end the process, and LimitExceeded if it takes too
    much memory or time.
    """
    try:
        isolation.call(try_tokenizer, directory, NoneType)
    except LimitExceeded as error:
        raise LimitExceeded(f"{directory}: loading its tokenizer, {error}") from error


def try_tokenizer(directory: Path) -> None:
    """Load a checkpoint's tokenizer, encode a text and decode it, in a process that this may end.

    Raises CheckpointError for a fault that `except Exception` does not catch, and MemoryError.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(directory), trust_remote_code=False, local_files_only=True
        )
        tokenizer.decode(tokenizer.encode(SAMPLE))
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - the server names it
        pass
    except BaseException as error:  # a panic of the tokenizers library is not an Exception
        reason = f"no usable tokenizer: {type(error).__name__}: {error}"
        raise CheckpointError(str(directory), None, reason) from error
