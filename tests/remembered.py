"""What was found of a model's configuration is kept in the tests' process: finding it takes most of
a second, more than what most tests are about, and they have the same few configurations.

Tests of the examination itself call `inspect_model`, which keeps nothing.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch

from ballast.core.settings import ModelSettings
from ballast.weights import manifest
from ballast.weights.architecture import Architecture


def remember_inspections() -> None:
    """Have manifests of equal configurations share what was found of the first."""
    inspected = manifest._inspected
    found: dict[tuple[object, ...], Architecture] = {}

    def remembered(
        settings: ModelSettings, config: Any, length: int | None, pooling: str = ""
    ) -> Architecture:
        values = config.to_json_string(use_diff=False)
        key = type(config), values, length, pooling, bool(settings.adapters)
        if key not in found:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)  # as in a worker
            try:
                found[key] = inspected(settings, config, length, pooling)
            finally:
                torch.set_num_threads(threads)
        return replace(deepcopy(replace(found[key], config=None)), config=config)

    manifest._inspected = remembered
