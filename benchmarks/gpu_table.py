"""What `gpu_results.json` says, line by line: for the terminal, and as the table of docs/gpu.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Found = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Line:
    what: str
    figure: str
    goal: str = ""
    met: bool | None = None


def on_what(found: Found) -> str:
    """GPU, driver and versions that all figures are of."""
    m = found.get("machine", {})
    return (
        f"{m.get('gpu')}, NVIDIA driver {m.get('nvidia_driver')} (CUDA {m.get('cuda_driver')}), "
        f"PyTorch {m.get('torch')}, Triton {m.get('triton')}, Python {m.get('python')}"
    )


def lines(found: Found) -> Iterator[Line]:
    """A line for each figure with a goal and for what explains it; and for what did not run."""
    figures = (_pages, _decodes, _overhead, _activations, _layouts, _layer, _sampling)
    for make in (_proofs, *figures):
        yield from make(found)
    for name, result in found.items():
        if not isinstance(result, Mapping):
            continue
        for key in ("not_run", "broke_off"):
            if key in result:
                yield Line(f"`{name}`", f"{key.replace('_', ' ')}: {result[key]}", met=False)
        for key, case in result.items():
            if isinstance(case, Mapping) and "broke_off" in case:
                yield Line(f"`{name}`, {key}", f"broke off: {case['broke_off']}", met=False)


def markdown(found: Found) -> str:
    """To be put into docs/gpu.md as it is."""
    rows = [f"| {x.what} | {x.figure} | {x.goal} | {_mark(x.met)} |" for x in lines(found)]
    head = ["| | measured | goal | |", "|---|---|---|---|"]
    return "\n".join([f"{on_what(found)}: `scripts/gpu_check`.", "", *head, *rows]) + "\n"


def plain(found: Found) -> str:
    rows = [f"{x.what:48} {x.figure:44} {x.goal:18} {_mark(x.met)}" for x in lines(found)]
    return "\n".join([on_what(found), *rows])


def _mark(met: bool | None) -> str:
    return "" if met is None else "met" if met else "missed"


def _part(found: Found, name: str) -> Found:
    result: Found = found.get(name, {})
    return result


def _proofs(found: Found) -> Iterator[Line]:
    tests = {k: v for k, v in _part(found, "tests").items() if isinstance(v, Mapping)}
    if tests:
        passed = sum(1 for t in tests.values() if t["passed"])
        yield Line("`gpu` tests, by file", f"{passed} of {len(tests)}", "all", passed == len(tests))
    for case, result in _part(found, "exactness").items():
        if isinstance(result, Mapping) and "wrong" in result:
            goal = "0; moves" if result["must_be_exact"] else ""
            names = ("evictions", "preemptions", "layers_loaded", "kv_moves")
            moves = "/".join(str(result[name]) for name in names)
            figure = f"{result['wrong']} of {result['tokens']}; moves {moves}"
            yield Line(f"tokens that differ, {case}", figure, goal, result["passed"])
    result = _part(found, "sanitizer")
    if "passed" in result:
        # Not passed without errors: the fleet or the tool failed.
        figure = f"{result.get('errors', 'none counted')}" + (
            "" if result["passed"] else ", failed"
        )
        yield Line("errors under memcheck", figure, "0", result["passed"])


def _pages(found: Found) -> Iterator[Line]:
    result = _part(found, "pool")
    if "microseconds" in result:
        us = result["microseconds"]
        figure = f"{us['both']:.1f} us: {us['map']:.1f} + {us['unmap']:.1f}"
        yield Line("map + unmap of a recycled page", figure, "<= 70 us", result["goal_met"])
    for key, us in result.items():
        if key.startswith("microseconds_") and key != "microseconds_by_call":
            what = key.removeprefix("microseconds_").replace("_", " ")
            longest = f"longest call {max(us['longest_map'], us['longest_unmap']):.0f} us"
            yield Line(f"the same, {what}", f"{us['both']:.1f} us a page, {longest}")
    for call, us in result.get("microseconds_by_call", {}).items():
        yield Line(f"{call}, 2 MiB", f"{us:.1f} us")
    if "calls_wait_for_kernels" in result:
        waits = "yes" if result["calls_wait_for_kernels"] else "no"
        part = 100 * result["longest_of_kernel"]
        figure = f"{waits}: the longest to map or unmap took {part:.1f} % of one"
        yield Line("calls for memory wait for kernels", figure)
    if "one_call_unmaps_many" in result:
        many = result["one_call_unmaps_many"]
        figure = f"{many:.1f} us a page" if isinstance(many, float) else f"no: {many}"
        yield Line("one call unmaps 64 pages", figure)


def _decodes(found: Found) -> Iterator[Line]:
    for key, result in _part(found, "single_model").items():
        what = key.replace("_", " ")
        if isinstance(result, float) and "over" in key:
            yield Line(f"decode, {what}", f"{result:.2f}")
        if not isinstance(result, Mapping) or "seconds" not in result:
            continue
        goal = {"8B_fused_batch_1": ">= 85 %", "8B_fused_batch_32": ">= 70 %"}.get(key, "")
        figure = f"{1e3 * result['seconds']:.2f} ms"
        prefill = "_prefill_" in key
        if prefill and "seconds_without" in result:
            figure += f"; without a graph {1e3 * result['seconds_without']:.2f} ms"
        if "of_roofline" in result:
            figure += f", {100 * result['of_roofline']:.0f} % of the roofline"
        if "device_seconds" in result:
            figure += f" ({1e3 * result['device_seconds']:.2f} of it the device's)"
        yield Line(what if prefill else f"decode, {what}", figure, goal, result.get("goal_met"))
        if result.get("same_tokens") is False:
            yield Line(f"tokens by graph, {what}", "others than without", "the same", False)


def _overhead(found: Found) -> Iterator[Line]:
    result = _part(found, "elastic_overhead")
    if "throughput_ratio" in result:
        yield Line(
            "`elastic_overhead`", f"{result['throughput_ratio']:.3f}", ">= 0.98", result["goal_met"]
        )


def _activations(found: Found) -> Iterator[Line]:
    part = _part(found, "activation")
    if "link_bytes_per_second" in part:
        yield Line("link, one plain copy", f"{part['link_bytes_per_second'] / 1e9:.1f} GB/s")
    for size, result in part.items():
        if isinstance(result, Mapping) and "of_link" in result:
            figure = (
                f"{1e3 * result['seconds']:.1f} ms, {100 * result['of_link']:.0f} % of the link"
            )
            figure += f" ({1e3 * result['mapping_seconds']:.1f} ms to map)"
            usual = "pages" not in size
            yield Line(
                f"activation, {size.replace('_', ' ')}",
                figure,
                ">= 90 %" if usual else "",
                result["goal_met"] if usual else None,
            )


def _layouts(found: Found) -> Iterator[Line]:
    for key, result in _part(found, "layouts").items():
        if isinstance(result, float) and key != "took_seconds":
            yield Line(f"attention of a step, {key.replace('_', ' ')}", f"{result:.0f} us")


def _layer(found: Found) -> Iterator[Line]:
    for batch, launches in _part(found, "layer").items():
        if not isinstance(launches, Mapping):
            continue
        for name, result in launches.items():
            what = f"layer, {batch.replace('_', ' ')}: {name}"
            if "broke_off" in result:
                yield Line(what, f"broke off: {result['broke_off']}", met=False)
                continue
            figure = f"{result['microseconds']:.1f} us"
            if "bytes_per_second" in result:
                figure += f", {result['bytes_per_second'] / 1e9:.0f} GB/s"
            yield Line(what, figure)


def _sampling(found: Found) -> Iterator[Line]:
    for name, case in _part(found, "sampling").items():
        if isinstance(case, Mapping):
            figure = f"{1e3 * case['seconds']:.2f} ms; on the host "
            figure += f"{1e3 * case['seconds_on_host']:.1f} ms; moved {case['rows_moved']}"
            what = f"sampling of {case['rows']} rows, {name.replace('_', ' ')}"
            yield Line(what, figure, "the same", case["passed"])
