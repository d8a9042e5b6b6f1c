"""What Prometheus is told, without a server."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ballast.cluster.combined_report import combined
from ballast.core.clock import VirtualClock
from ballast.core.model import AdapterSpec, ModelSpec
from ballast.core.report import STEP_BOUNDS, DeviceReport, ModelReport, StepTokens
from ballast.server.observe.device_metrics import DeviceCollector
from ballast.server.observe.latency import Timing
from ballast.server.observe.metrics import Metrics
from tests.cluster.fake_device import spec


def model(name: str, residency: str = "resident", **numbers: float) -> ModelReport:
    fields = "weight_pages kv_pages cached_pages waiting running late activations evictions"
    more = "preemptions prompt_tokens cached_tokens output_tokens"
    result: dict[str, Any] = dict.fromkeys(f"{fields} {more}".split(), 0) | numbers
    return ModelReport(name=name, residency=residency, lane_seconds=0.0, **result)


def device(*models: ModelReport, **owners: int) -> DeviceReport:
    held = {owner.replace("_", ":", 1): n for owner, n in owners.items()}
    return DeviceReport(
        device="cpu:0",
        now=0.0,
        page_bytes=4096,
        total=100,
        free=100 - sum(held.values()),
        reclaiming=0,
        owners=held,
        models=models,
        jobs=7,
        draining=False,
    )


class Facts:
    def __init__(self, report: DeviceReport | None, *specs: ModelSpec) -> None:
        self.report = report
        self.specs = {s.name: s for s in specs}
        self.down: str | None = None
        self.restarts = self.moved_in = 0
        self.requests: list[str] = []
        self.host = ""

    def items(self) -> list[tuple[str, Facts]]:
        return [("cpu:0", self)]


class Scraped:
    """All samples, as a scraper reads them."""

    def __init__(self, facts: Facts | None = None) -> None:
        self.facts = facts or Facts(None)
        self.clock = VirtualClock(1000.0)
        self.metrics = Metrics(DeviceCollector(self.facts, self.clock), self.clock)

    def samples(self, name: str) -> list[tuple[dict[str, str], float]]:
        text = self.metrics.text().decode()
        return [
            (s.labels, s.value)
            for family in text_string_to_metric_families(text)
            for s in family.samples
            if s.name == name
        ]

    def one(self, name: str, **labels: str) -> float:
        (value,) = [
            v for have, v in self.samples(name) if {k: have.get(k) for k in labels} == labels
        ]
        return value


def test_a_request_from_its_arrival_to_its_end() -> None:
    result = Scraped()
    timing = Timing(10.0)
    result.metrics.asked("a", 2, 8)
    result.metrics.token("a", timing, 5, 12.0, 0.5)
    for now in (12.25, 13.0):
        result.metrics.token("a", timing, 5, now)
    result.metrics.finished("a", timing, 5, 3, "stop", 13.0, cached_tokens=4)
    assert result.one("vllm_prompt_tokens_total", model_name="a") == 5
    assert result.one("vllm_generation_tokens_total", model_name="a") == 3
    assert result.one("vllm_request_success_total", finished_reason="stop") == 1
    sums = {
        "vllm_time_to_first_token_seconds": 2.0,
        "vllm_inter_token_latency_seconds": 1.0,
        "vllm_time_per_output_token_seconds": 1.0,
        "vllm_request_time_per_output_token_seconds": 0.5,
        "vllm_e2e_request_latency_seconds": 3.0,
        "vllm_request_queue_time_seconds": 0.5,
        "vllm_request_prefill_time_seconds": 1.5,
        "vllm_time_per_prefill_token_request_seconds": 1.5,  # of the one token that was computed
        "vllm_request_decode_time_seconds": 1.0,
        "vllm_request_inference_time_seconds": 2.5,
        "vllm_request_prompt_tokens": 5,
        "vllm_request_generation_tokens": 3,
        "vllm_request_prefill_kv_computed_tokens": 1,
        "vllm_request_params_n": 2,
        "vllm_request_params_max_tokens": 8,
    }
    assert {name: result.one(f"{name}_sum", model_name="a") for name in sums} == sums
    assert {result.samples(f"{name}_sum")[0][0]["engine"] for name in sums} == {"0"}
    assert result.one("vllm_inter_token_latency_seconds_count") == 2
    assert result.one("vllm_time_per_output_token_seconds_bucket", le="0.2") == 0
    assert result.one("vllm_time_per_output_token_seconds_bucket", le="0.3") == 1
    ttft, tpot = result.metrics.recent("a")
    assert ttft.quantiles() is not None
    assert tpot.quantiles() is not None


def test_a_request_that_never_began_has_no_times_but_one() -> None:
    result = Scraped()
    result.metrics.finished("a", Timing(0.0), 5, 0, "abort", 4.0)
    assert result.one("vllm_request_success_total", finished_reason="abort") == 1
    assert result.one("vllm_e2e_request_latency_seconds_sum") == 4.0
    assert not result.samples("vllm_prompt_tokens_total")
    assert not result.samples("vllm_request_queue_time_seconds_count")
    assert not result.samples("vllm_request_decode_time_seconds_count")


def test_an_answer_without_tokens_counts_its_prompt() -> None:
    result = Scraped()
    result.metrics.finished("a", Timing(0.0), 5, 0, "stop", 4.0)
    assert result.one("vllm_prompt_tokens_total", model_name="a") == 5


def test_labels_are_never_what_a_client_made_up() -> None:
    result = Scraped()
    result.metrics.answered(None, "BREW", 404, "not_found", 0.1)
    result.metrics.answered("/v1/models", "GET", 200, None, 0.1)
    assert result.one("http_requests_total", handler="other", method="other", status="404") == 1
    assert result.one("http_requests_total", handler="/v1/models", method="GET", status="200") == 1
    assert result.one("ballast_http_errors_total", status="404", code="not_found") == 1


def test_pages_add_up_and_lanes_count_as_one() -> None:
    facts = Facts(device(model("a"), weights_a=10, kv_a=20, arena_lane0=3, arena_lane1=4))
    result = Scraped(facts)
    assert result.one("ballast_pages", owner="weights", model="a") == 10
    assert result.one("ballast_pages", owner="arena", model="") == 7
    pages = sum(n for _, n in result.samples("ballast_pages"))
    assert pages + result.one("ballast_free_pages") == result.one("ballast_pool_pages")


def test_layers_that_rotate_are_told_with_what_they_give_and_cost() -> None:
    rotating = model(
        "a",
        weight_pages=9,
        layers=12,
        resident_layers=8,
        rotating_layers=4,
        absent_layers=3,
        lent_pages=3,
        loads=5,
        loaded_bytes=20480,
        copy_seconds=0.5,
        stall_seconds=0.25,
    )
    result = Scraped(Facts(device(rotating, model("b", layers=2, resident_layers=2), slots_a=1)))
    values = {
        "ballast_layers": 12,
        "ballast_resident_layers": 8,
        "ballast_rotating_layers": 4,
        "ballast_absent_layers": 3,
        "ballast_layers_lent_bytes": 3 * 4096,
        "ballast_layer_loads_total": 5,
        "ballast_layer_loaded_bytes_total": 20480,
        "ballast_layer_copy_seconds_total": 0.5,
        "ballast_layer_stall_seconds_total": 0.25,
    }
    assert {name: result.one(name, model_name="a") for name in values} == values
    assert result.one("ballast_absent_layers", model_name="b") == 0
    assert result.one("ballast_pages", owner="slots", model="a") == 1
    assert result.one("ballast_device_bytes", owner="slots") == 4096


def test_kv_usage_counts_what_requests_hold_of_what_they_could_have() -> None:
    busy = model("a", kv_pages=30, cached_pages=10, waiting=2, running=1)
    idle = model("b", kv_pages=10, cached_pages=10, waiting=1)
    result = Scraped(Facts(device(busy, idle, kv_a=30, kv_b=10, weights_a=20)))
    assert result.one("vllm_kv_cache_usage_perc", model_name="a") == pytest.approx(20 / 70)
    assert result.one("vllm_kv_cache_usage_perc", model_name="b") == 0
    assert result.one("ballast_kv_cache_usage") == pytest.approx(20 / 80)
    assert result.one("ballast_queued_requests") == 3
    assert result.one("ballast_running_requests") == 1


def test_gateways_see_what_is_here_and_what_is_waited_for() -> None:
    adapter = AdapterSpec(name="a-law", fingerprint="0" * 16, rank=4)
    base = spec("a")
    with_adapter = type(base)(**{f: getattr(base, f) for f in base.__slots__} | {
        "adapters": (adapter,)
    })  # fmt: skip
    reports = (model("a"), model("b", "absent", waiting=1), model("c", "absent"))
    result = Scraped(Facts(device(*reports, arena_lane0=10), with_adapter, spec("b"), spec("c")))
    ((adapters, at),) = result.samples("vllm_lora_requests_info")
    assert adapters == {
        "max_lora": "1",
        "running_lora_adapters": "a-law",
        "waiting_lora_adapters": "",
    }
    assert at == 1000.0
    ((names, _),) = result.samples("ballast_lora_requests_info")
    assert names == {
        "max_lora": "4",
        "running_lora_adapters": "a,a-law",
        "waiting_lora_adapters": "b",
    }
    # A block: 16 tokens of 2 x 1 head x 8 values x 4 bytes; 90 pages of 4096 bytes hold 360.
    ((cache, _),) = result.samples("ballast_cache_config_info")
    assert cache == {"block_size": "16", "num_gpu_blocks": "360"}
    blocks = {
        c["model_name"]: c["num_gpu_blocks"] for c, _ in result.samples("vllm_cache_config_info")
    }
    assert blocks["b"] == "356"  # its weights take a page


def test_without_a_worker_and_with_a_strange_report_there_is_still_an_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    result = Scraped()
    result.facts.down, result.facts.restarts = "it died", 2
    assert result.one("ballast_worker_up") == 0
    assert result.one("ballast_worker_restarts_total") == 2
    result.facts.report = device(model("a"))
    object.__setattr__(result.facts.report, "owners", None)
    assert result.one("vllm_num_requests_running", model_name="a") == 0
    assert "cannot be told" in caplog.text


def test_jobs_are_counted_by_their_tokens_on_all_devices_together() -> None:
    def steps(**by_bound: int) -> StepTokens:
        counts = [by_bound.get(f"at_most_{n}", 0) for n in (*STEP_BOUNDS, "none")]
        return StepTokens(tuple(counts), 1000)

    here = replace(model("a"), steps=steps(at_most_1=2, at_most_16=3))
    there = replace(model("a"), steps=steps(at_most_16=1, at_most_none=4))
    both = combined([device(here), device(there)])
    result = Scraped(Facts(both, spec("a")))
    name = "vllm_iteration_tokens"
    found = {labels["le"]: n for labels, n in result.samples(f"{name}_bucket")}
    assert [found[le] for le in ("1.0", "8.0", "16.0", "16384.0", "+Inf")] == [2, 2, 6, 6, 10]
    assert result.one(f"{name}_count", model_name="a", engine="0") == 10
    assert result.one(f"{name}_sum", model_name="a", engine="0") == 2000


def test_the_server_process_is_measured() -> None:
    result = Scraped()
    for name in ("resident_memory_bytes", "cpu_seconds_total", "open_fds", "start_time_seconds"):
        assert result.one(f"process_{name}") > 0


def test_hosts_are_sums_of_their_devices() -> None:
    facts = Facts(device(model("a")))
    assert Scraped(facts).samples("ballast_host_devices") == []
    facts.host, facts.requests = "two", ["a request"]
    result = Scraped(facts)
    assert result.samples("ballast_device_host") == [({"device": "cpu:0", "host": "two"}, 1)]
    assert result.samples("ballast_host_devices") == [({"host": "two"}, 1)]
    assert result.samples("ballast_host_open_requests") == [({"host": "two"}, 1)]
