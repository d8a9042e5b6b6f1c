"""What a story in a file costs the loop: processor time of a turn with one and without.

One model on a simulated device that decodes for 1, 8 and 64 sequences without leaps: each turn
takes in a job's end and starts the next. The least of several runs counts, in turn with and
without. A prompt costs its digests once, when it arrives.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ballast.core.chains import Chain
from ballast.core.cost import UNMEASURED
from ballast.core.entries import Sink
from ballast.core.link import LinkRates
from ballast.core.request import Submission
from ballast.core.settings import DeviceSettings
from ballast.core.units import GiB, MiB
from ballast.engine.story_file import StoryFile
from ballast.policy.presets import resolve
from ballast.sim.device import SimDevice
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.model_catalogue import catalogue
from benchmarks.common import finish, options

SEQUENCES = (1, 8, 64)
PROMPT, OUTPUT = 64, 400
LONG_PROMPT = 2000
DEVICE = DeviceSettings(
    budget_bytes=60 * GiB, page_bytes=2 * MiB, step_tokens=2048, step_logits=256
)
SPEC = replace(catalogue()["Llama-2-7b"].spec(max_model_len=4096), name="m")


def turn_seconds(sequences: int, sink: Sink | None) -> float:
    """Processor time of a turn."""
    profile = MachineProfile(costs={"m": UNMEASURED}, link=LinkRates.even(1e10), overhead=0.0)
    device = SimDevice(
        DEVICE, [SPEC], resolve("balloon"), profile, lambda at, said: None, sink, leaps=False
    )
    for i in range(sequences):
        prompt = tuple(range(i, i + PROMPT))
        name = f"chatcmpl-{i:032d}"
        device.submit(
            Submission(id=name, model="m", prompt=prompt, max_tokens=OUTPUT, ignore_eos=True)
        )
    began = time.process_time()
    device.finish(0.0)
    return (time.process_time() - began) / device.state.jobs


def digest_seconds() -> float:
    """Of a long prompt."""
    began = time.process_time()
    Chain(b"k" * 32, "m", SPEC.block_tokens).push(tuple(range(LONG_PROMPT)))
    return time.process_time() - began


def main() -> None:
    args = options(__doc__)
    rounds = 3 if args.quick else 9
    result: dict[str, Any] = {"us_per_turn": {}, "bytes_per_job": {}}
    with TemporaryDirectory() as scratch:
        path = Path(scratch) / "story"
        for n in SEQUENCES:
            without, outcome = [], []
            for _ in range(rounds):
                without.append(turn_seconds(n, None))
                path.write_bytes(b"")
                file = StoryFile(path, "cpu:0")
                outcome.append(turn_seconds(n, file.write))
                file.close()
            result["us_per_turn"][n] = 1e6 * (min(outcome) - min(without))
            result["bytes_per_job"][n] = path.stat().st_size / (OUTPUT + 1)
    result["us_per_prompt_of_2000"] = 1e6 * min(digest_seconds() for _ in range(50))
    finish(args, "story_cost", result)


if __name__ == "__main__":
    main()
