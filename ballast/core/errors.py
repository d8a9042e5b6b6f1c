"""Define all exceptions of Ballast in one tree, named by fault and remedy.

::

    BallastError
    |- ConfigError          a setting is wrong: fix the named key
    |- CheckpointError      a checkpoint is unusable: fix or replace the named file and tensor
    |- NotThere             a model's directory cannot be had: mend its entry, or bring it there
    |- UnsupportedModel     an architecture Ballast cannot serve: choose another
    |- LimitExceeded        reading a checkpoint takes more than any should: mend or replace it
    |- RequestError         the client's fault; the request is refused, nothing else changes
    |  |- InvalidRequest    a field has a bad value: `param` names it
    |  |- ContextLengthExceeded
    |  |- AnswerTooLarge    the answer could have more values than its limit
    |  |- UnknownModel
    |  `- NeverFits         the request needs more memory than its model can ever get here
    |- TokenizerFailed      a model's tokenizer cannot encode or decode something: mend it
    |- NonFiniteOutput      a model computed NaN or infinity for a request: mend the model
    |- Unavailable          the service drains or the worker is gone: try again elsewhere or later
    |- NotKept              an operator's change could not be recorded: make room, or let it write
    |- DeviceError          an operating system or driver call failed; the books are as before
    |  |- OutOfMemory       a GPU's driver has no more; becomes `Short` where pages were asked for
    |  `- DeviceLost        a GPU answers nothing any more: its worker ends and is replaced
    `- BrokenPromise        an invariant of Ballast does not hold: a bug, never a user's fault

Running out of pages raises nothing: it is a result (`ballast.core.actions.Short`).
"""

from __future__ import annotations

from typing import Any

DISTRIBUTION = "ballast-serve"
"""Name by which pip knows this package; `ballast` on PyPI is another's."""


def install_extra(extra: str) -> str:
    """Return the command that installs what an extra of pyproject.toml names."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


class BallastError(Exception):
    """Root of all exceptions that Ballast raises on purpose. Picklable, whatever its arguments."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception would call the class with `args`, which is the finished message alone.
        return _again, (type(self), *self.args), self.__dict__


def _again(kind: type[BallastError], *args: object) -> BallastError:
    return kind.__new__(kind, *args)


_BRIEF_CHARACTERS = 250


def brief(error: BaseException) -> str:
    """Shorten an error of foreign code, which may fill pages, to its class and first two lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"[:_BRIEF_CHARACTERS]


class ConfigError(BallastError):
    """A bad setting: its key, its value, and the allowed values.

    `value`: None if the key is missing or unknown.
    """

    def __init__(self, key: str, value: object, allowed: str) -> None:
        super().__init__(f"{key}: {allowed}" if value is None else f"{key}: {value!r}: {allowed}")
        self.key, self.value, self.allowed = key, value, allowed


class CheckpointError(BallastError):
    """An unusable checkpoint: the file, the tensor if one is at fault, and the reason."""

    def __init__(self, file: str, tensor: str | None, reason: str) -> None:
        where = file if tensor is None else f"{file}, tensor {tensor!r}"
        super().__init__(f"{where}: {reason}")
        self.file, self.tensor, self.reason = file, tensor, reason


class NotThere(BallastError):
    """A model or adapter whose directory could not be had when its entry was read."""


class UnsupportedModel(BallastError):
    """An architecture that Ballast cannot serve, with the reason."""


class LimitExceeded(BallastError):
    """Reading a checkpoint took more memory or time than any checkpoint should."""


class RequestError(BallastError):
    """A request that cannot be served as asked."""

    code = "invalid_request"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequest(RequestError):
    """A field has a value that is not allowed."""


class ContextLengthExceeded(RequestError):
    """Prompt plus requested output exceed the model's context; prompts are never truncated."""

    code = "context_length_exceeded"


class AnswerTooLarge(RequestError):
    """The answer could have more tokens, with their alternatives, than one answer may."""

    code = "answer_too_large"


class UnknownModel(RequestError):
    """The fleet has no model of that name."""

    code = "model_not_found"


class NeverFits(RequestError):
    """The request's KV cache could not fit even with the device to itself."""

    code = "insufficient_memory"


class NonFiniteOutput(BallastError):
    """A model has computed numbers that are not finite for a request, which ends with this."""

    code = "not_finite"

    def __init__(self, model: str, what: str) -> None:
        super().__init__(
            f"{model!r} computed {what} that are not finite (NaN or infinity); its weights, or its "
            "dtype's range, do not suffice for this request"
        )


class TokenizerFailed(BallastError):
    """A model's tokenizer failed at a text or tokens of one request, which ends with this."""

    code = "tokenizer_failed"

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"the model's tokenizer failed at this request: {brief(error)}")


class Unavailable(BallastError):
    """The server is draining or its worker is gone."""


class NotKept(BallastError):
    """An operator's change cannot be recorded where it would survive a restart."""


class DeviceError(BallastError):
    """An operating system or driver call failed. `call` names it."""

    def __init__(self, call: str, reason: str) -> None:
        super().__init__(f"{call}: {reason}")
        self.call, self.reason = call, reason


class OutOfMemory(DeviceError):
    """A GPU's driver found no memory left; allocators of pages turn it into `Short`."""


class DeviceLost(DeviceError):
    """A GPU cannot be used by this process any more; every later call of its driver fails too.

    A kernel has broken the context (for example by an illegal address), or actual mappings differ
    from the mapping table. Only a new process recovers.
    """


class BrokenPromise(BallastError):
    """An internal invariant is violated. Please report it."""
