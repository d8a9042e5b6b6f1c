"""Layers rotate in a group of two ranks: tokens of one rank, equal pages on both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ballast.bench.inprocess import InProcess
from tests.cluster.tensor_parallel.test_group_machine import over_ranks
from tests.engine.checkpoints import make_llama
from tests.engine.test_rotating import disturb
from tests.live.test_live_device import asked, fleet

MODEL = "a"


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {MODEL: make_llama(root / MODEL, 0, num_hidden_layers=6)}


def test_layers_of_a_group_rotate_and_change_no_token(paths: dict[str, Path]) -> None:
    warm = (replace(r, id=f"{r.id}-warm") for r in asked(1, 0.8, (MODEL,)))
    requests = [*asked(2, models=(MODEL,)), *warm]
    plain = fleet(paths)
    with InProcess(plain) as one:
        alone = one.generate(requests)
    with InProcess(over_ranks(plain, 60)) as server:
        disturb(server, 1)
        answers = server.generate(requests)
        server.drain()
        state = server.device.state
        state.pool.validate()
        weights = state.models[MODEL].weights
        weights.validate()
        # Asked of the operating system on both ranks; raises where they differ.
        seen = len(state.pool.vm.os_pages(weights.range.range))
        assert seen == weights.range.backed + weights.range.aliased
        assert weights.stream is not None
        assert weights.stream.loads.n > 0
    assert {id: a.tokens for id, a in answers.items()} == {id: a.tokens for id, a in alone.items()}
