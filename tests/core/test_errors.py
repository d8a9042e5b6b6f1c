"""Errors cross process boundaries whole."""

from __future__ import annotations

import copy
import pickle

import pytest

from ballast.core import errors
from ballast.core.errors import BallastError
from ballast.workload.workload import WorkloadError

MADE_OF: dict[type[BallastError], tuple[object, ...]] = {
    errors.ConfigError: ("models.a", 3, "allowed are 1 and 2"),
    errors.CheckpointError: ("model.safetensors", None, "it is empty"),
    errors.RequestError: ("too long", "prompt"),
    errors.DeviceError: ("mmap", "no memory"),
    errors.OutOfMemory: ("cuMemCreate", "no memory"),
    errors.NonFiniteOutput: ("a", "logits"),
    errors.DeviceLost: ("cuLaunchKernel", "an illegal address was accessed"),
    WorkloadError: ("no such column", "trace.csv", 7),
}


def of_the_tree() -> list[type[BallastError]]:
    found = (c for c in vars(errors).values() if isinstance(c, type))
    return [WorkloadError, *(c for c in found if issubclass(c, BallastError))]


@pytest.mark.parametrize("kind", of_the_tree())
def test_an_error_survives_pickling(kind: type[BallastError]) -> None:
    error = kind(*MADE_OF.get(kind, ("a reason",)))
    error.add_note("told where it was caught")
    copies = [
        pickle.loads(pickle.dumps(error, protocol))
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
    ]
    for again in (*copies, copy.copy(error)):
        assert type(again) is kind
        assert str(again) == str(error)
        assert vars(again) == vars(error)
