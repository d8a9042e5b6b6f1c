"""Fit the profiles of public devices to measured latencies: writes ballast/sim/profiles/*.toml.

Coefficients only: the tables of points stay where they are. The same tables give the same files.

    .venv/bin/python -m scripts.fit_profiles --tables ../shared/profiles
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from ballast.core.cost import StepCosts
from ballast.sim.model_catalogue import CatalogueKeys, ModelFacts
from ballast.sim.profile import CATALOGUE, DeviceProfile
from ballast.sim.profile_tables import (
    CostCoefficients,
    EngineProfile,
    LinkProfile,
    MeasuredModel,
    MeasurementSource,
    PageCallCosts,
)
from ballast.sim.roofline import AllReduce, Derate, Hardware, KernelReach, Sizes
from ballast.sim.toml_file import as_toml
from scripts.derating import GroupDerate, Measured, fit_derate, fit_group, median_derate
from scripts.fit_engines import (
    ACTIVATIONS_SOURCE,
    HELD,
    MAP_SECONDS,
    ON,
    PAGES_SOURCE,
    STEPS,
    UNMAP_SECONDS,
    fit_steps,
    fitted_reading,
    graphs_engine,
    kernels,
    kernels_reach,
    page_seconds,
    reach_like,
    reach_of_kernels,
    sglang_engine,
)
from scripts.measured import Pair, Tables, read_tables, rows
from scripts.point_fits import errors, fit_decode, fit_prefill

EAGER, GRAPHS, SGLANG = "eager", "graphs", "sglang"
PROFILES = Path(__file__).parent.parent / "ballast" / "sim" / "profiles"
SOURCES = {
    "aegaeon": MeasurementSource(
        artifact="github.com/MachineLearningSystem/25SOSP-Aegaeon, 1c3b110, aegaeon/profiles",
        licence="Apache-2.0; changed: coefficients fitted to medians of its measurements",
        engine=EAGER,
        note="vLLM 0.5.1, eager, fp16, one GPU; prompts to 4,096 tokens, to 200 sequences; "
        "the host's work at every step is in the costs",
    ),
    "muxserve": MeasurementSource(
        artifact="github.com/hao-ai-lab/MuxServe, 2231480, examples/placement/llama.json",
        licence="none found: fitted coefficients only, no measured values",
        engine=EAGER,
        note="MuxServe, fp16; prompts to 512 tokens; sm_percent is the share of MPS threads of "
        "one process that runs alone; the host's work is in the costs",
    ),
    "vidur": MeasurementSource(
        artifact="github.com/microsoft/vidur, 7d47513, data/profiling",
        licence="MIT; changed: coefficients fitted to its measurements",
        note="kernels without an engine, and NCCL's all-reduce inside a node",
    ),
}
LINKS = {
    "A100-80G": LinkProfile(
        to_device=25.1e9,
        to_host=25e9,
        to_device_mixed=11e9,
        to_host_mixed=24e9,
        source="NVIDIA/nvbandwidth issue 42 (to_device, A100-SXM4-40GB) and issue 53 (the rest, "
        "A100-SXM4-80GB, about)",
    ),
    "GH200-96G": LinkProfile(
        to_device=427e9,
        to_host=427e9 * 297 / 375,
        to_device_mixed=366e9 / 2,
        to_host_mixed=366e9 / 2,
        source="MIRAGE 3.2: 427 GB/s when the host's memory is only read, 366 in all at a "
        "read-to-write ratio of 1:1; to_host in proportion to arXiv:2407.07850 (375 and 297)",
        assumed=["to_host"],
    ),
}
"""What copies between host and device reach, where measured."""
LIKE = {"PCIe": "A100-80G", "NVLink-C2C": "GH200-96G"}
"""Others reach the same share of their link's figure as this device on such a link ..."""
PCIE5_MIXED = 101.3 / (56.2 + 57.1)
"""... but PCIe 5 carries more in both directions at once: of a device that is not named, both
together over each alone (NVIDIA/cuda-samples issue 357)."""


SCALED = {"H200", "H800", "H20-96G", "GB200"}
"""Devices with a switched NVLink whose all-reduces are not at hand."""
NVLINK4 = 450e9


def least_per_pair(model: ModelFacts, hardware: Hardware) -> float:
    """Seconds of attention per query-key pair at the peak."""
    return Sizes.of_facts(model).pair_flops / hardware.flops


def least_per_context(model: ModelFacts, hardware: Hardware) -> float:
    """Seconds to read a token's KV at the peak."""
    return Sizes.of_facts(model).kv_bytes / hardware.memory_bandwidth


def fitted_row(tables: Tables, pair: Pair) -> MeasuredModel:
    """Of one measured pair. Prefills that were dropped leave their coefficients out."""
    hardware, model = tables.hardware[pair[0]], tables.models[pair[1]]
    decodes = tables.decode[pair]
    decode = fit_decode(decodes, least_per_context(model, hardware))
    costs: dict[str, float] = {
        "base": decode.base,
        "per_sequence": decode.per_sequence,
        "per_context": decode.per_context,
        "per_tile": decode.per_tile,
    }
    decode_error = _percent(np.abs(errors(decode, decodes)).mean())
    prefill_error = None
    if pair in tables.prefill:
        prefills = tables.prefill[pair]
        prefill = fit_prefill(prefills, least_per_pair(model, hardware))
        costs |= {
            "per_token": prefill.per_token,
            "per_pair": prefill.per_pair,
            "floor": prefill.floor,
            "hidden": decode.base - prefill.start,
        }
        prefill_error = _percent(np.abs(errors(prefill, prefills)).mean())
    return MeasuredModel(
        model=pair[1],
        source="aegaeon",
        costs=CostCoefficients(**costs),
        prefill_error=prefill_error,
        decode_error=decode_error,
    )


def stated_rows(tables: Tables, folder: Path, device: str) -> list[MeasuredModel]:
    """Those of which only fits are at hand, at every share of the multiprocessors."""
    of_device = {
        (r["model"], r["tp"])
        for r in rows(folder / "latency_fit.csv")
        if r["source"] == "muxserve" and r["gpu"] == device
    }
    phases: dict[tuple[str, int, int], dict[str, dict[str, str]]] = {}
    for r in rows(folder / "sm_latency_fit.csv"):
        if (r["model"], r["tp"]) in of_device:
            key = (tables.named(r["model"]), int(r["tp"]), int(r["sm_pct"]))
            phases.setdefault(key, {})[r["phase"]] = r
    found = []
    for (model, tp, sm), both in phases.items():
        p, d = both["prefill"], both["decode"]
        base = float(d["a_s"])
        costs = CostCoefficients(
            base=base,
            per_sequence=float(d["b_s"]),
            per_context=float(d["c_s"]),
            per_tile=float(d["d_s"]),
            per_token=float(p["b_s"]),
            # Fitted to sum l^2, twice the pairs under a causal mask.
            per_pair=2 * float(p["c_s"]),
            floor=float(p["floor_s"]),
            hidden=base - float(p["a_s"]),
        )
        found.append(
            MeasuredModel(
                model=model,
                source="muxserve",
                tp=tp,
                sm_percent=sm,
                costs=costs,
                prefill_error=float(p["mape_pct"]),
                decode_error=float(d["mape_pct"]),
            )
        )
    return found


def reach_of(measured: Sequence[MeasuredModel]) -> float:
    """What part of a device reads of its bandwidth, over that part: by passes over weights that up
    to half of the multiprocessors made, of models that need no other device. 1: nobody measured."""
    base = {(row.model, row.sm_percent): row.costs.base for row in measured if row.tp == 1}
    found = [
        base[model, 100] / (seconds * percent / 100)
        for (model, percent), seconds in base.items()
        if percent <= 50
    ]
    return round(statistics.median(found), 2) if found else 1.0


def link_of(device: str, all_hardware: Mapping[str, Hardware]) -> LinkProfile:
    """As measured, or as its kind of link lets expect."""
    if device in LINKS:
        return LINKS[device]
    hardware = all_hardware[device]
    like = next(d for link, d in LIKE.items() if hardware.host_link.startswith(link))
    share = hardware.host_bandwidth / all_hardware[like].host_bandwidth
    to_device, to_host = LINKS[like].to_device * share, LINKS[like].to_host * share
    mixed = (LINKS[like].to_device_mixed * share, LINKS[like].to_host_mixed * share)
    source = f"in proportion to {like}"
    if hardware.host_link.startswith("PCIe5"):
        mixed = (to_device * PCIE5_MIXED, to_host * PCIE5_MIXED)
        source += "; mixed to alone as of a PCIe 5 device in NVIDIA/cuda-samples issue 357"
    return LinkProfile(
        to_device=to_device,
        to_host=to_host,
        to_device_mixed=mixed[0],
        to_host_mixed=mixed[1],
        source=source,
        assumed=["to_device", "to_host", "to_device_mixed", "to_host_mixed"],
    )


def all_reduces(folder: Path, device: str, hardware: Hardware) -> list[AllReduce]:
    """Inside a node with NVLink between all its devices. Where nobody measured them, those of an
    H100, at the own link's bandwidth."""
    if device in SCALED:
        return [
            a.model_copy(
                update={
                    "per_byte": a.per_byte * NVLINK4 / (hardware.peer_bandwidth or NVLINK4),
                    "source": "vidur, of H100-80G, scaled to this link",
                    "error": None,
                }
            )
            for a in all_reduces(folder, "H100-80G", hardware)
        ]
    return [
        AllReduce(
            tp=int(r["tp"]),
            least=float(r["small_level_s"]),
            base=float(r["large_alpha_s"]),
            per_byte=float(r["large_beta_s_per_byte"]),
            source="vidur",
            error=float(r["max_form_mape_pct"]),
        )
        for r in rows(folder / "allreduce_fit.csv")
        if r["gpu"] == device and r["testbed"].endswith("_dgx") and r["crosses_nodes"] == "no"
    ]


def groups(tables: Tables, folder: Path, without: str | None = None) -> GroupDerate:
    """As models split among A100s show."""
    found = [
        (tables.models[row.model].layers, StepCosts(**row.costs.model_dump()))
        for row in stated_rows(tables, folder, "A100-80G")
        if row.tp > 1 and row.sm_percent == 100 and row.model != without
    ]
    return fit_group(found)


def derate_of(tables: Tables, device: str, models: Iterable[str], group: GroupDerate) -> Derate:
    """As `models` on it show, but those with experts: they are few and unlike each other."""
    return fit_derate(measured_on(tables, device, models), tables.hardware[device], group)


def measured_on(tables: Tables, device: str, models: Iterable[str] | None = None) -> list[Measured]:
    """Select those without experts of `models`, or of all that were measured there."""
    if models is None:
        models = [m for d, m in tables.decode if d == device]
    return [
        Measured(
            Sizes.of_facts(tables.models[m]),
            tables.prefill.get((device, m)),
            tables.decode[device, m],
        )
        for m in models
        if not tables.models[m].experts
    ]


def profiles(folder: Path) -> dict[str, DeviceProfile]:
    """One per device."""
    tables = read_tables(folder)
    on: dict[str, list[str]] = {}
    for device, model in tables.decode:
        on.setdefault(device, []).append(model)
    group = groups(tables, folder)
    own = {device: derate_of(tables, device, models, group) for device, models in on.items()}
    reaches, graphs = reaches_of(tables, folder, own)
    page = page_seconds(link_of(ON, tables.hardware).to_device)
    found = {}
    for device, hardware in tables.hardware.items():
        measured = [fitted_row(tables, p) for p in tables.decode if p[0] == device]
        measured += stated_rows(tables, folder, device)
        reduces = all_reduces(folder, device, hardware)
        used = {row.source for row in measured} | ({"vidur"} if reduces else set())
        eager = EngineProfile(
            served_by="engines that launch every kernel from the host, as the sources say",
            derate=own.get(device, median_derate(own.values())),
        )
        found[device] = DeviceProfile(
            device=device,
            engine=GRAPHS,
            page_seconds=page,
            page_source=ACTIVATIONS_SOURCE,
            pages=PageCallCosts(
                map_seconds=MAP_SECONDS,
                unmap_seconds=UNMAP_SECONDS,
                beside_seconds=page - MAP_SECONDS,
                source=PAGES_SOURCE,
            ),
            lane_reach=reach_of(measured),
            link=link_of(device, tables.hardware),
            hardware=hardware,
            reach=reaches[device],
            engines={GRAPHS: graphs, SGLANG: sglang_engine(graphs), EAGER: eager},
            sources={name: source for name, source in SOURCES.items() if name in used},
            measured=measured,
            all_reduce=reduces,
            held=list(HELD) if device == ON else [],
        )
    return found


def reaches_of(
    tables: Tables, folder: Path, own: Mapping[str, Derate]
) -> tuple[dict[str, KernelReach], EngineProfile]:
    """By device what kernels reach, and the engine that replays graphs; `own`: derates of the
    devices on which whole models were measured."""
    timed = {device: kernels(tables, folder, device) for device in tables.hardware}
    timed = {device: found for device, found in timed.items() if found}
    hardware = tables.hardware[ON]
    reduces = all_reduces(folder, ON, hardware)
    attention, all_reduce = fit_steps(STEPS, hardware, *kernels_reach(timed[ON]), reduces)
    reaches = {d: reach_of_kernels(found, own[d], attention) for d, found in timed.items()}
    kernel_reaches = list(reaches.values())
    layer = statistics.median(r.layer_seconds for r in kernel_reaches)
    readings = {d: r.reading for d, r in reaches.items()} | {
        d: fitted_reading(measured_on(tables, d), tables.hardware[d], layer)
        for d in own
        if d not in timed
    }
    unmeasured = median_derate(own.values())
    for d in tables.hardware:
        if d not in reaches:
            reading = readings.get(d, statistics.median(readings.values()))
            derate = own.get(d, unmeasured)
            reaches[d] = reach_like(kernel_reaches, derate, reading, measured=d in own)
    return reaches, graphs_engine(STEPS, all_reduce, reduces)


def catalogue_of(folder: Path) -> CatalogueKeys:
    models = read_tables(folder).models
    return CatalogueKeys(
        source="published configurations; parameters computed from the architecture",
        models=list(models.values()),
    )


def _percent(share: float) -> float:
    return round(100 * float(share), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--tables", type=Path, default=Path("../shared/profiles"))
    parser.add_argument("--to", type=Path, default=PROFILES)
    args = parser.parse_args()
    args.to.mkdir(parents=True, exist_ok=True)
    made = "Written by scripts/fit_profiles.py. Seconds, bytes, tokens; see docs/profiles.md."
    for device, profile in profiles(args.tables).items():
        notes = [made]
        if not profile.measured:
            notes.append("No model was measured here: reach and derate are other devices' median.")
        (args.to / f"{device}.toml").write_text(as_toml(profile, *notes), encoding="utf-8")
    (args.to / CATALOGUE).write_text(as_toml(catalogue_of(args.tables), made), encoding="utf-8")


if __name__ == "__main__":
    main()
