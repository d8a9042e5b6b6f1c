"""What `c2c_live` and `c2c_shared` serve: small models, their memory, link and service levels."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ballast.bench.inprocess import InProcess
from ballast.bench.report import Report
from ballast.bench.servers import run_servers
from ballast.core.link import LinkSettings
from ballast.core.request import Submission
from ballast.core.settings import DeviceSettings, FleetSettings, ModelSettings, Slo
from ballast.core.units import GiB
from ballast.workload.workload import Workload, WorkloadRequest
from benchmarks.contenders import Comparison, Contender
from benchmarks.exactness import make_llama

N_MODELS, N_FIT = 12, 2
LLAMA = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
CONTEXT = 512
AT_ONCE = 8
"""Requests of mean length whose KV fits beside the weights of `N_FIT` models."""
MEAN_PROMPT, MEAN_OUTPUT = 52, 25
DECODED = 60
"""Tokens by which a decode step's seconds are measured."""
LINK_OF_MEMORY = 450e9 / 4000e9
"""GH200: NVLink-C2C one way over HBM3."""
COMPARED = Comparison(
    {},
    {
        "swap": Contender("swap+deadline"),
        "balloon": Contender("balloon"),
        "prism": Contender("prism"),
        "c2cserve": Contender("c2cserve"),
        "whole prompts": Contender("c2cserve", {"whole": 1}, ablates="c2cserve"),
        "in host memory": Contender("c2cserve", {"promote": 0}, ablates="c2cserve"),
    },
)
"""All order by deadline; `chunks` does too, and cuts prompts besides, which `whole prompts` does
not. In the last row all weights stay in host memory, as the paper has it."""


@dataclass(frozen=True)
class Setting:
    """Models, the memory that they share, and what this machine reads."""

    models: tuple[ModelSettings, ...]
    budget: int
    page: int
    roomy: int
    """Budget in which all models are resident."""
    link: float = 1.0
    """Bytes per second of the paced link."""
    slo: Slo = field(default_factory=Slo)

    @property
    def names(self) -> list[str]:
        return [m.name for m in self.models]

    def fleet(self, row: str, *, paced: bool, budget: int | None = None) -> FleetSettings:
        """One device."""
        device = DeviceSettings(
            budget_bytes=budget or self.budget, page_bytes=self.page, prefix_cache=False
        )
        return FleetSettings(
            models=tuple(replace(m, slo=self.slo) for m in self.models),
            device=device,
            link=LinkSettings(bytes_per_second=self.link if paced else None),
            preset=COMPARED.rows[row].preset,
            options=COMPARED.options(row),
        )


def prepare(scratch: Path) -> Setting:
    """Make the models; the budget is for two of them, and KV of some requests. Levels are TTFT 5
    times and TPOT twice the P95 of models that are asked one by one, all of them resident; the link
    has the part of what a token reads per second that GH200's has of device memory."""
    models = tuple(
        ModelSettings(
            name=f"m{seed:02}",
            path=str(make_llama(scratch / f"m{seed:02}", seed, **LLAMA)),
            dtype="bfloat16",
            max_model_len=CONTEXT,
        )
        for seed in range(N_MODELS)
    )
    device = DeviceSettings(budget_bytes=4 * GiB, prefix_cache=False, threads=1)
    with InProcess(FleetSettings(models=models, device=device, preset="balloon")) as server:
        state = server.device.state
        page = server.device.fleet.device.page_bytes
        m = next(iter(state.models.values()))
        tokens = AT_ONCE * (MEAN_PROMPT + MEAN_OUTPUT)
        kv = round(tokens * m.spec.kv_bytes_per_token / page) + N_MODELS
        pages = state.arena.pages + N_FIT * m.weights.pages + kv
        roomy = state.arena.pages + N_MODELS * m.weights.pages + 4 * kv
        n_bytes = sum(m.spec.segment_bytes)
        link = LINK_OF_MEMORY * n_bytes / _token_seconds(server, m.spec.name)
    setting = Setting(models, pages * page, page, roomy * page)
    fleet = setting.fleet("balloon", paced=False, budget=setting.roomy)
    records = run(fleet, one_by_one(setting), "alone").records[len(setting.names) :]
    ttft = float(np.percentile([r.ttft for r in records if r.ttft is not None], 95))
    tpots = [r.tpot for r in records if r.tpot is not None]
    slo = Slo(ttft=5 * ttft, tpot=2 * float(np.percentile(tpots, 95)))
    return replace(setting, link=link, slo=slo)


def _token_seconds(server: InProcess, model: str) -> float:
    """Seconds of a decode step, of processor time: a busy machine makes no link slower."""
    for tokens in (4, DECODED):  # the first compiles
        submission = Submission(id=f"{tokens}", model=model, prompt=(11,) * 8, max_tokens=tokens)
        began = time.process_time()
        answers = server.generate([submission])
        seconds = (time.process_time() - began) / len(answers[submission.id].tokens)
    return seconds


def one_by_one(setting: Setting) -> Workload:
    """Requests of mean length that don't meet, two of each model."""
    return asked(
        (0.5 * n, name, MEAN_PROMPT, MEAN_OUTPUT) for n, name in enumerate(setting.names * 2)
    )


def asked(requests: Iterable[tuple[float, str, int, int]]) -> Workload:
    """A workload of (time, model, prompt, output)."""
    made = (
        WorkloadRequest(id=n, at=at, model=model, prompt_tokens=prompt, output_tokens=output)
        for n, (at, model, prompt, output) in enumerate(requests)
    )
    return Workload.of("given", made)


def run(fleet: FleetSettings, work: Workload, name: str) -> Report:
    """Serve a workload in worker processes, and judge it by the fleet's levels."""
    levels: Mapping[str, Slo] = {m.name: m.slo for m in fleet.models}
    return asyncio.run(run_servers([fleet], work, levels, name=name)).report


def p95_ttft(reports: Sequence[Report]) -> float | None:
    """Of all requests that got a first token; None: none did."""
    times = [r.ttft for report in reports for r in report.records if r.ttft is not None]
    return float(np.percentile(times, 95)) if times else None
