"""A tokenizer and its chat template tried out, so that whoever uses them later is not the first.

A tokenizer's files are parsed by native code, and a chat template is a program: either may take
memory or time without end, or end the process. So they are tried in a process of their own
(`ballast.isolation`). Ordinary faults are no matter here: the server names them when it loads the
tokenizer, and many templates do not accept every conversation.
"""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType, NoneType

from ballast.core.errors import CheckpointError, LimitExceeded
from ballast.isolation.zygote import Isolation

TEMPLATE_SECONDS = 2
"""Processor time for one short message: templates take a millisecond."""
_MESSAGES = [{"role": "user", "content": "Hello"}]


def vet_tokenizer(directory: Path, isolation: Isolation) -> None:
    """Have it tried in isolation. Raises CheckpointError and LimitExceeded, with the reason."""
    try:
        isolation.call(try_tokenizer, directory, NoneType)
    except LimitExceeded as error:
        what = f"{directory}: trying its tokenizer and chat template"
        raise LimitExceeded(f"{what}, {error}") from error


def try_tokenizer(directory: Path) -> None:
    """Load a checkpoint's tokenizer, and render one message if it has a chat template.

    Only on the main thread of a process of its own. Raises CheckpointError for a tokenizer that
    would end the process that loads it, and LimitExceeded for a template that takes too long.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(directory), trust_remote_code=False, local_files_only=True
        )
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - the server says why
        return
    except BaseException as error:  # a panic of the tokenizers library is no Exception
        reason = f"no usable tokenizer: {type(error).__name__}: {error}"
        raise CheckpointError(str(directory), None, reason) from error
    if not tokenizer.chat_template:
        return
    signal.signal(signal.SIGPROF, _too_long)
    signal.setitimer(signal.ITIMER_PROF, TEMPLATE_SECONDS)
    try:
        tokenizer.apply_chat_template(_MESSAGES, tokenize=False, add_generation_prompt=True)
    except (LimitExceeded, MemoryError):
        raise
    except Exception:  # noqa: BLE001 - a template may refuse this conversation
        pass
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _too_long(number: int, frame: FrameType | None) -> None:
    raise LimitExceeded(f"one short message took more than {TEMPLATE_SECONDS} s")
