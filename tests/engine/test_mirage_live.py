"""The preset `mirage` on a real device: layers are lent, come back, and change no token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ballast.bench.inprocess import InProcess
from ballast.core.rotation import WHOLE
from tests.engine.checkpoints import make_llama
from tests.live.test_live_device import NAMES, asked, fleet


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {n: make_llama(root / n, i, num_hidden_layers=6) for i, n in enumerate(NAMES)}


@pytest.mark.parametrize("turns", [{}, {"temporal": 1}, {"temporal": 1, "preemptive": 1}])
def test_layers_are_lent_and_no_token_changes(
    paths: dict[str, Path], turns: dict[str, float]
) -> None:
    requests = asked(4)
    with InProcess(fleet(paths)) as server:
        alone = server.generate(requests)
        models = server.device.state.models.values()
        weights = sum(m.weights.pages for m in models)
        longest = max(m.kv.layout.pages(-(-140 // m.spec.block_tokens)) for m in models)
    tight = fleet(paths, weights + longest, "mirage")
    # No cap: how much is lent does not depend on how fast this machine is.
    options = {**turns, "quantum": 0.05, "cap": 0, "cooldown": 0.05}
    with InProcess(replace(tight, options=options)) as server:
        state = server.device.state
        loads = [m.weights.stream.loads for m in state.models.values() if m.weights.stream]
        for _ in range(20):  # in turns of so many seconds, a loaded machine may need no layer
            answers = server.generate(requests)
            for id, answer in answers.items():
                assert answer.tokens == alone[id].tokens, id
            if sum(one.n for one in loads) > 0:
                break
        else:
            pytest.fail("no layer was lent")
        for _ in range(200):  # turns of the loop, in which layers come back
            server.generate(asked(1, models=NAMES[:1]))
            if all(m.rotation == WHOLE for m in state.models.values()):
                break
        else:
            pytest.fail("layers stay lent for ever")
        server.drain()
        state.pool.validate()
        for m in state.models.values():
            m.weights.validate()
