"""The fleet file: what it resolves to, and what each mistake is told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ballast.core.errors import ConfigError
from ballast.core.link import LinkRates
from ballast.core.sampling_defaults import SamplingDefaults
from ballast.core.settings import (
    AdapterSettings,
    FleetSettings,
    KeySettings,
    Role,
    ServerSettings,
    Slo,
)
from ballast.core.units import KiB, MiB
from ballast.fleet.fleet_file import load_fleet
from ballast.fleet.hub import choose_gguf
from ballast.fleet.key_hints import KEYS, OTHERS, paths_of, place_of
from ballast.fleet.schema import FleetKeys
from benchmarks import gguf_files

PRESETS = ("static", "swap", "balloon", "ballast")
MINIMAL = """
models:
  - {name: a, path: m}
devices:
  - {budget: 64MiB}
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    (tmp_path / "quantized").mkdir()
    (tmp_path / "quantized" / "model-q4_k_m.gguf").write_bytes(b"GGUF")
    return tmp_path


def load(home: Path, text: str, **environ: str) -> FleetSettings:
    file = home / "fleet.yaml"
    file.write_text(text)
    return load_fleet(
        file, presets=PRESETS, environ=environ, fetch_hub=lambda hub_id, key: f"/hub/{hub_id}"
    )


def fault(home: Path, text: str, **environ: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(home, text, **environ)
    return caught.value


def test_minimal_file_takes_the_defaults_of_the_settings(home: Path) -> None:
    fleet = load(home, MINIMAL)
    assert fleet.preset == "ballast"
    assert fleet.device.budget_bytes == 64 * MiB
    assert fleet.device.page_bytes == 256 * KiB
    assert fleet.link.bytes_per_second is None
    (model,) = fleet.models
    assert (model.name, model.path, model.dtype) == ("a", str(home / "m"), "auto")
    assert model.slo == Slo()
    assert fleet.story_path is None


def test_every_key(home: Path) -> None:
    fleet = load(
        home,
        """
        preset: swap
        options: {idle_seconds: 5, share: 0.5}
        story: out/story.jsonl
        defaults:
          dtype: float32
          slo: {ttft: 1, tpot: 0.1}
        models:
          - name: a
            path: m
            dtype: bfloat16
            slo: {tpot: 0.05}
            priority: 3
            share: 2.5
            limits: {context: 512, running: 8, waiting: 0, queue_seconds: 30}
            block_tokens: 32
            pinned: true
            tool_parser: hermes
          - {name: b/c, path: m}
        devices:
          - {name: "cpu:1", budget: 1GB, page: 2MiB, threads: 2, step_tokens: 128,
             step_logits: 16, prefix_cache: false}
        links:
          - {bandwidth: 4GB/s, mixed: 6GB/s}
        """,
    )
    a, b = fleet.models
    assert (a.dtype, a.slo, a.priority, a.share) == ("bfloat16", Slo(ttft=1, tpot=0.05), 3, 2.5)
    assert (a.max_model_len, a.max_running, a.max_waiting) == (512, 8, 0)
    assert (a.block_tokens, a.pinned) == (32, True)
    assert (a.queue_seconds, a.tool_parser) == (30.0, "hermes")
    assert (b.queue_seconds, b.tool_parser) == (None, "auto")
    assert (b.name, b.dtype, b.slo, b.pinned) == ("b/c", "float32", Slo(ttft=1, tpot=0.1), False)
    device = fleet.device
    assert (device.name, device.budget_bytes, device.page_bytes) == ("cpu:1", 10**9, 2 * MiB)
    assert (device.threads, device.step_tokens, device.step_logits) == (2, 128, 16)
    assert device.prefix_cache is False
    assert (fleet.link.device, fleet.link.pace) == ("cpu:1", LinkRates.even(4e9, 6e9))
    assert (fleet.preset, fleet.options) == ("swap", {"idle_seconds": 5.0, "share": 0.5})
    assert fleet.story_path == str(home / "out/story.jsonl")


def test_several_devices_each_have_their_own(with_adapter: Path) -> None:
    fleet = load(
        with_adapter,
        """
        defaults: {devices: ["cpu:0", big]}
        models:
          - {name: a, path: m}
          - {name: b, path: m, devices: ["cpu:2"]}
          - {name: l, adapter: lora, base: a}
        devices:
          - {budget: 64MiB}
          - {budget: 1GB, name: big, threads: 3}
          - {budget: 32MiB, page: 64KiB}
        links:
          - {bandwidth: 1GB/s}
          - {bandwidth: 4GB/s, device: big}
        """,
    )
    devices = fleet.devices
    assert list(devices) == ["cpu:0", "big", "cpu:2"]
    assert [link.bytes_per_second for _, link in devices.values()] == [1e9, 4e9, 1e9]
    assert [device.threads for device, _ in devices.values()] == [None, 3, None]
    assert devices["cpu:2"][0].page_bytes == 64 * KiB
    assert [m.devices for m in fleet.models] == [("cpu:0", "big"), ("cpu:2",)]
    assert fleet.device.name == "cpu:0"
    with pytest.raises(ConfigError, match=r"devices.*this takes one device"):
        fleet.of_one_device("this")


FROM_ENVIRONMENT = """
models:
  - name: ${N:-a}
    path: m
    priority: ${P}
    dtype: "${D:-float32}"
devices:
  - budget: ${BUDGET:-32MiB}
"""


def test_environment(home: Path) -> None:
    fleet = load(home, FROM_ENVIRONMENT, P="7")
    assert fleet.models[0].priority == 7
    assert fleet.models[0].dtype == "float32"
    assert fleet.device.budget_bytes == 32 * MiB
    assert load(home, FROM_ENVIRONMENT, P="7", BUDGET="1MiB").device.budget_bytes == MiB
    assert load(home, FROM_ENVIRONMENT, P="7", BUDGET="").device.budget_bytes == 32 * MiB
    assert load(home, MINIMAL + "story: $${HOME}/s\n").story_path == str(home / "${HOME}/s")

    error = fault(home, FROM_ENVIRONMENT)
    assert error.key == "models[0].priority"
    assert "environment variable P" in error.allowed
    assert "write ${NAME}" in fault(home, FROM_ENVIRONMENT.replace("${P}", "${1}")).allowed
    assert "valid integer" in fault(home, FROM_ENVIRONMENT.replace("${P}", '"${P}"'), P="7").allowed


def test_a_value_from_the_environment_is_a_value_and_never_structure(home: Path) -> None:
    error = fault(home, FROM_ENVIRONMENT, P="1", N="x, priority: 3")
    assert (error.key, error.value) == ("models[0].name", "x, priority: 3")


@pytest.mark.parametrize(
    ("old", "new", "key", "says"),
    [
        ("name: a", "name: a, slo: {tfft: 1}", "models[0].slo.tfft", "did you mean 'ttft'"),
        ("name: a", "name: a, slo: {ttft: 0}", "models[0].slo.ttft", "greater than 0"),
        ("name: a", "name: a, slo: {ttft: .inf}", "models[0].slo.ttft", "finite"),
        ("name: a", "name: a, slo: {ttft: '2'}", "models[0].slo.ttft", "valid number"),
        ("name: a", "name: a, slo: 3", "models[0].slo", "keys among: ttft, tpot"),
        ("name: a", "name: a, dtype: float16", "models[0].dtype", "'float32' or 'bfloat16'"),
        ("name: a", "name: a, share: 0", "models[0].share", "greater than 0"),
        ("name: a", "name: a/../b", "models[0].name", "no part '..' between slashes"),
        ("name: a", "name: a//b", "models[0].name", "no part '' between slashes"),
        ("name: a", "name: a, limits: {context: 1}", "models[0].limits.context", "equal to 2"),
        ("name: a", "name: a, pinned: 1", "models[0].pinned", "boolean"),
        ("name: a", "name: a, priority: yes", "models[0].priority", "integer"),
        ("name: a", "name: a, limits: {running: 0}", "models[0].limits.running", "or equal to 1"),
        ("name: a", "name: a, name: b", "models[0].name", "twice"),
        ("name: a", "name: 'a b'", "models[0].name", "pattern"),
        ("name: a, ", "", "models[0].name", "required"),
        ("path: m", "path: nowhere", "models[0].path", "checkpoint directory"),
        ("path: m", "path: " + "m" * 300, "models[0].path", "checkpoint directory"),
        ("path: m", "path: ~nobody-at-all/m", "models[0].path", "checkpoint directory"),
        ("path: m", "path: 'hf:x'", "models[0].path", "hf:org/name"),
        ("path: m", "path: m, prio: 1", "models[0].prio", "did you mean 'priority'"),
        ("path: m", "path: m, max_model_len: 1", "models[0].max_model_len", "`models[i].limits.c"),
        ("path: m", "path: m, max-num-seqs: 1", "models[0].max-num-seqs", "`models[i].limits.r"),
        ("path: m", "path: m, ttft: 1", "models[0].ttft", "sets is `models[i].slo.ttft`"),
        ("path: m", "path: m, budget: 1", "models[0].budget", "sets is `devices[i].budget`"),
        ("path: m", "path: m.gguf", "models[0].path", "there is no such file"),
        ("path: m", "path: quantized", "models[0].path", "not a GGUF file"),
        ("path: m", "path: 'hf:org/Some-7B:'", "models[0].path", "with :Q4_K_M, a GGUF file"),
        ("models:", "port: 80\nmodels:", "port", "`ballast serve --port`"),
        ("budget: 64MiB", "budget: 64MiBs", "devices[0].budget", "512MiB"),
        ("budget: 64MiB", "budget: 0", "devices[0].budget", "greater than 0"),
        ("budget: 64MiB", "budget: true", "devices[0].budget", "512MiB"),
        ("budget: 64MiB", "budget: 1KiB", "devices[0].budget", "one page"),
        (
            "budget: 64MiB",
            "budget: 400KiB, tensor_parallel: 2",
            "devices[0].budget",
            "on each rank",
        ),
        (
            "budget: 64MiB",
            "budget: 64MiB, tensor_parallel: 2, lanes: 2, threads: 2",
            "devices[0].lanes",
            "one job at a time",
        ),
        ("models:", "placement: followed\nmodels:", "placement", "'follow'"),
        ("budget: 64MiB", "budget: 64MiB, page: 3000", "devices[0].page", "power of two"),
        ("budget: 64MiB", "budget: 64MiB, bugdet: 1", "devices[0].bugdet", "'budget'"),
        (
            "  - {budget: 64MiB}",
            "  - {budget: 1GB, name: cpu:1}\n  - {budget: 1GB}",
            "devices[1].name",
            "devices[0] has that name",
        ),
        ("name: a", "name: a, devices: [gpu]", "models[0].devices", "known here: cpu:0"),
        ("name: a", "name: a, devices: ['cpu:0', 'cpu:0']", "models[0].devices", "named once"),
        ("  - {budget: 64MiB}", "  []", "devices", "at least 1 item"),
        ("models:", "preset: balon\nmodels:", "preset", "did you mean 'balloon'"),
        ("models:", "model: 1\nmodels:", "model", "did you mean 'models'"),
        ("models:", "options: {x: fast}\nmodels:", "options.x", "valid number"),
        ("models:", "links: [{device: gpu}]\nmodels:", "links[0].device", "known here: cpu:0"),
        ("models:", "links: [{bandwidth: fast}]\nmodels:", "links[0].bandwidth", "size"),
        ("models:", "links: [{mixed: 1GB/s}]\nmodels:", "links[0].mixed", "bandwidth"),
        ("models:", "links: [{}, {}]\nmodels:", "links[1].device", "links[0] is its link"),
        ("models:", "defaults: {name: x}\nmodels:", "defaults.name", "known here: slo"),
        ("models:", "defaults: {slo: {ttft: -1}}\nmodels:", "defaults.slo.ttft", "greater than 0"),
        ("models:", "defaults: 3\nmodels:", "defaults", "mapping"),
    ],
)
def test_a_fault_names_key_value_and_remedy(
    home: Path, old: str, new: str, key: str, says: str
) -> None:
    assert old in MINIMAL
    error = fault(home, MINIMAL.replace(old, new, 1))
    assert error.key == key
    assert says in error.allowed
    assert key in str(error)
    assert "is not allowed" not in str(error)  # nothing here is forbidden


def test_a_key_that_is_not_there_has_no_value(home: Path) -> None:
    error = fault(home, MINIMAL.replace("name: a", "name: a, max_seq_len: 8"))
    assert str(error) == (
        "models[0].max_seq_len: there is no such key; what it sets is `models[i].limits.context`"
    )
    error = fault(home, MINIMAL.replace("name: a", "name: a, slo: {ttft: 0}"))
    assert str(error) == "models[0].slo.ttft: 0: it should be greater than 0"


def test_keys_of_other_servers_lead_to_keys_that_there_are() -> None:
    assert set(KEYS.values()) <= set(paths_of(FleetKeys))
    ours = {path.rpartition(".")[2] for path in paths_of(FleetKeys)}
    assert not ours & {*KEYS, *OTHERS}
    assert place_of("threads") == "`devices[i].threads`"
    assert place_of("bandwith") is None


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("name: a", "name: a, device: cuda:0", "did you mean 'devices'"),
        ("models:", "device: {budget: 1GB}\nmodels:", "did you mean 'devices'"),
        ("models:", "link: {}\nmodels:", "`links`"),
        ("name: a", "name: a, keep_alive: 5m", "`ttl`"),
        ("name: a", "name: a, keep-alive: 5m", "`ttl`"),
        ("models:", "keep_alive: 300\nmodels:", "`models[i].ttl`"),
        ("models:", "defaults: {keep_alive: 300}\nmodels:", "`ttl`"),
        ("name: a", "name: a, alias: b", "did you mean 'aliases'"),
        ("name: a", "name: a, thread: 2", "`devices[i].threads`"),
        ("budget: 64MiB", "budget: 64MiB, lane: 2", "`lanes`"),
        ("name: a", "name: a, torch_dtype: float32", "`dtype`"),
    ],
)
def test_hints_point_to_the_nearest_key_that_there_is(
    home: Path, old: str, new: str, says: str
) -> None:
    assert old in MINIMAL
    allowed = fault(home, MINIMAL.replace(old, new, 1)).allowed
    assert allowed.startswith("there is no such key; ")
    assert says in allowed
    assert "links[i].device" not in allowed


def test_places_that_messages_name_are_in_the_fleet_file() -> None:
    known = set(paths_of(FleetKeys))
    named = re.compile(r"\b(?:models|devices|links|keys)\[i\](?:\.[a-z_]+)+")
    found = 0
    for file in (Path(__file__).parents[2] / "ballast").rglob("*.py"):
        for path in named.findall(file.read_text()):
            assert {path, f"server.{path}"} & known, f"{file}: {path}"
            found += 1
    assert found


def test_names_are_unique(home: Path) -> None:
    error = fault(home, MINIMAL.replace("devices", "  - {name: a, path: m}\ndevices"))
    assert error.key == "models[1].name"


@pytest.mark.parametrize(
    ("entry", "key", "value"),
    [
        ("name: b, path: m, aliases: [c, a]", "models[1].aliases", "a"),
        ("name: b, path: m, aliases: [gpt-4o]", "models[1].aliases", "gpt-4o"),
        ("name: gpt-4o, path: m", "models[1].name", "gpt-4o"),
        ("name: x, adapter: lora, base: a, aliases: [gpt-4o]", "models[1].aliases", "gpt-4o"),
        ("name: b, path: m, aliases: [b]", "models[1].aliases", ["b"]),
        ("name: b, path: m, aliases: [c, c]", "models[1].aliases", ["c", "c"]),
    ],
)
def test_an_alias_is_the_name_of_one_model(
    with_adapter: Path, entry: str, key: str, value: object
) -> None:
    named = MINIMAL.replace("name: a", "name: a, aliases: [gpt-4o, org/name]")
    error = fault(with_adapter, named.replace("devices", f"  - {{{entry}}}\ndevices"))
    assert (error.key, error.value) == (key, value)
    fleet = load(with_adapter, named)
    assert fleet.aliases == {"a": ("gpt-4o", "org/name")}
    assert fleet.models[0].names == {"a", "gpt-4o", "org/name"}


def test_a_model_has_the_time_to_live_of_the_defaults_or_its_own(home: Path) -> None:
    text = "defaults: {ttl: 300}\n" + MINIMAL.lstrip().replace(
        "devices", "  - {name: b, path: m, ttl: 0}\ndevices"
    )
    assert [m.ttl for m in load(home, text).models] == [300.0, 0.0]
    assert fault(home, text.replace("ttl: 0", "ttl: -1")).key == "models[1].ttl"


@pytest.mark.parametrize("origin", ["https://a.example/", "a.example", "https://", "**"])
def test_an_origin_is_a_scheme_and_a_host(home: Path, origin: str) -> None:
    allowed = ["*", "https://a.example", "http://127.0.0.1:3000", "http://[::1]:80"]
    fleet = load(home, MINIMAL + f"server: {{cors_origins: {allowed!r}}}\n")
    assert fleet.server.cors_origins == tuple(allowed)
    error = fault(home, MINIMAL + f"server: {{cors_origins: [{origin!r}]}}\n")
    assert (error.key, error.value) == ("server.cors_origins[0]", origin)


@pytest.mark.parametrize("host", ["http://a.example", "a.example:80", "*", "", "a/b", "-a", "a b"])
def test_a_host_is_a_name_alone(home: Path, host: str) -> None:
    error = fault(home, MINIMAL + f"server: {{hosts: [{host!r}]}}\n")
    assert (error.key, error.value) == ("server.hosts[0]", host)


ADAPTERS = """
defaults: {dtype: float32, priority: 1, limits: {context: 64, waiting: 7, queue_seconds: 3}}
models:
  - {name: x, adapter: lora, base: a, priority: 5, slo: {ttft: 1}}
  - {name: a, path: m}
  - {name: y, adapter: lora, base: a}
  - {name: b, path: m}
devices:
  - {budget: 64MiB}
"""


@pytest.fixture
def with_adapter(home: Path) -> Path:
    (home / "lora").mkdir()
    (home / "lora" / "adapter_config.json").write_text("{}")
    return home


def test_adapters_stand_with_their_base(with_adapter: Path) -> None:
    a, b = load(with_adapter, ADAPTERS).models
    assert (a.name, a.max_model_len, b.name, b.adapters) == ("a", 64, "b", ())
    path = str(with_adapter / "lora")
    assert a.adapters == (
        AdapterSettings(
            name="x", path=path, slo=Slo(ttft=1), priority=5, max_waiting=7, queue_seconds=3
        ),
        AdapterSettings(name="y", path=path, priority=1, max_waiting=7, queue_seconds=3),
    )
    hub = load(with_adapter, ADAPTERS.replace("adapter: lora", "adapter: 'hf:org/lora'"))
    assert hub.models[0].adapters[0].path == "/hub/org/lora"


@pytest.mark.parametrize(
    ("old", "new", "key", "says"),
    [
        ("base: a,", "base: c,", "models[0].base", "known here: a, b"),
        ("base: a,", "base: y,", "models[0].base", "known here: a, b"),
        (" base: a,", "", "models[0].base", "required beside `adapter`"),
        ("base: a,", "base: a, path: m,", "models[0].path", "takes it from its base"),
        ("base: a,", "base: a, pinned: true,", "models[0].pinned", "known here: name, adapter"),
        (
            "base: a,",
            "base: a, limits: {running: 2},",
            "models[0].limits.running",
            "known here: waiting, queue_seconds",
        ),
        ("base: a,", "base: a, bas: 1,", "models[0].bas", "did you mean 'base'"),
        ("adapter: lora", "adapter: m", "models[0].adapter", "adapter_config.json"),
        ("name: x", "name: a", "models[1].name", "models[0] has that name"),
        ("name: a, path: m", "name: a, base: b, path: m", "models[1].base", "only an adapter"),
        ("name: a, path: m", "name: a", "models[1].path", "required"),
    ],
)
def test_a_fault_of_an_adapter(with_adapter: Path, old: str, new: str, key: str, says: str) -> None:
    assert old in ADAPTERS
    error = fault(with_adapter, ADAPTERS.replace(old, new, 1))
    assert error.key == key
    assert says in error.allowed


SERVER = (
    MINIMAL
    + """
server:
  keys:
    - name: team-a
      key: "${KEY_A}"
      models: [a]
      requests_per_minute: 60
      tokens_per_minute: 10000
      concurrent: 4
      isolated: true
    - {name: team-b, key: sk-bbb-0123456789}
  admin_key: ${KEY_ADMIN}
  hosts: [ballast.example, box]
  most_open: 10
  most_connections: 20
  most_body: 1MiB
  ping_seconds: 1
  drain_seconds: 0
  silent_seconds: 5.5
  starting_seconds: 45
  stuck_seconds: 60
  loading_seconds: 900
  deprecated_metrics: true
  request_texts: true
  spare_worker: false
"""
)
SECRETS = {"KEY_A": "0123456701234567", "KEY_ADMIN": "sk-admin-01234567"}


def test_the_server_section(home: Path) -> None:
    assert load(home, MINIMAL).server == ServerSettings()
    server = load(home, SERVER, **SECRETS).server
    assert server == ServerSettings(
        keys=(
            KeySettings(
                name="team-a",
                key="0123456701234567",
                models=("a",),
                requests_per_minute=60,
                tokens_per_minute=10_000,
                concurrent=4,
                isolated=True,
            ),
            KeySettings(name="team-b", key="sk-bbb-0123456789"),
        ),
        admin_key="sk-admin-01234567",
        hosts=("ballast.example", "box"),
        most_open=10,
        most_connections=20,
        most_body_bytes=MiB,
        ping_seconds=1,
        drain_seconds=0,
        silent_seconds=5.5,
        starting_seconds=45,
        stuck_seconds=60,
        loading_seconds=900,
        deprecated_metrics=True,
        request_texts=True,
        spare_worker=False,
    )
    for secret in ("0123456701234567", "sk-bbb-0123456789", "sk-admin-01234567"):
        assert secret not in repr(server)


@pytest.mark.parametrize(
    ("old", "new", "key", "says"),
    [
        ('"${KEY_A}"', "${KEY_A}", "server.keys[0].key", "in quotes"),
        ('"${KEY_A}"', '""', "server.keys[0].key", "must not be empty"),
        ('"${KEY_A}"', '"a secret"', "server.keys[0].key", "printable ASCII"),
        ('"${KEY_A}"', '"${MISSING}"', "server.keys[0].key", "environment variable MISSING"),
        ('"${KEY_A}"', "sk-bbb-0123456789", "server.keys[1].key", "server.keys[0] is the same"),
        ('"${KEY_A}"', "sk-admin-01234567", "server.keys[0].key", "server.admin_key is the same"),
        ('"${KEY_A}"', "'0123456789abcde'", "server.keys[0].key", "openssl rand -hex 24"),
        ("${KEY_ADMIN}", "short", "server.admin_key", "16 characters or more"),
        ("key: sk-bbb", "key: sk-bbb-0123456789, kye: sk-bbb", "server.keys[1].kye", "mean 'key'"),
        (
            "{name: team-b, key: sk-bbb-0123456789}",
            "sk-bbb-0123456789",
            "server.keys[1]",
            "keys among: name, key",
        ),
        ("admin_key", "adminkey", "server.adminkey", "did you mean 'admin_key'"),
        ("team-b", "team-a", "server.keys[1].name", "server.keys[0] has that name"),
        ("concurrent: 4", "concurrent: 0", "server.keys[0].concurrent", "or equal to 1"),
        ("most_body: 1MiB", "most_body: big", "server.most_body", "512MiB"),
    ],
)
def test_a_fault_of_the_server_section_tells_no_secret(
    home: Path, old: str, new: str, key: str, says: str
) -> None:
    assert old in SERVER
    error = fault(home, SERVER.replace(old, new, 1), **SECRETS)
    assert error.key == key
    assert says in str(error)
    for secret in (
        "0123456701234567",
        "sk-bbb-0123456789",
        "sk-admin-01234567",
        "a secret",
        "0123456789abcde",
    ):
        assert secret not in str(error)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "- 1",
        "a: [",
        "a: 1\n---\nb: 2",
        "a: !!python/name:os 1",
        "a: 2024-13-45",
        "a: !!int abc",
        "a: !!timestamp abc",
        "a: \x07",
        f"a: {'9' * 5000}",
        f"a: {'[' * 3000}",
    ],
)
def test_not_a_fleet_file(home: Path, text: str) -> None:
    assert fault(home, text).key == str(home / "fleet.yaml")


def test_unreadable_file(home: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_fleet(home / "absent.yaml", presets=PRESETS)
    (home / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_fleet(home / "bytes.yaml", presets=PRESETS)


def test_hub_ids(home: Path) -> None:
    def path_of(text: str) -> str:
        return load(home, MINIMAL.replace("path: m", f"path: '{text}'")).models[0].path

    assert path_of("org/name") == "/hub/org/name"
    assert path_of("hf:org/name@main") == "/hub/org/name@main"
    (home / "org" / "name").mkdir(parents=True)
    (home / "org" / "name" / "config.json").write_text("{}")
    assert path_of("org/name") == str(home / "org" / "name")
    assert path_of("hf:org/name") == "/hub/org/name"
    assert path_of(str(home / "m")) == str(home / "m")


def test_a_hub_id_without_network_is_a_clear_fault(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    file = home / "fleet.yaml"
    file.write_text(MINIMAL.replace("path: m", "path: hf:no-org/no-model"))
    with pytest.raises(ConfigError) as caught:
        load_fleet(file, presets=PRESETS, environ={})
    assert caught.value.key == "models[0].path"
    assert "could not be reached" in caught.value.allowed


GGUFS = [
    "m-Q4_0.gguf", "m-Q4_K_M-00001-of-00002.gguf", "m-Q4_K_M-00002-of-00002.gguf",
    "m-IQ4_K_M.gguf", "Q8_0/whole.gguf", "mmproj-m-F16.gguf",
]  # fmt: skip


@pytest.mark.parametrize(
    ("chosen", "files"),
    [
        ("Q4_0", GGUFS[:1]),
        ("q4_k_m", GGUFS[1:3]),
        ("m-IQ4_K_M", GGUFS[3:4]),
        ("Q8_0", GGUFS[4:5]),
        ("F16", "no GGUF file of it ends so; it has whole, m-IQ4_K_M, m-Q4_0, m-Q4_K_M"),
        ("0", "no GGUF file of it ends so"),
        ("", "it has these GGUF files: whole, m-IQ4_K_M, m-Q4_0, m-Q4_K_M; name one"),
    ],
)
def test_a_gguf_file_of_a_repository_is_chosen_by_its_end(
    chosen: str, files: list[str] | str
) -> None:
    if isinstance(files, list):
        assert choose_gguf(GGUFS, chosen, "org/m", "path") == files
        return
    with pytest.raises(ConfigError) as caught:
        choose_gguf(GGUFS, chosen, "org/m", "path")
    assert caught.value.allowed.startswith(files)


def test_several_gguf_files_of_one_end_are_named() -> None:
    files = ["m-Q4_0.gguf", "m-UD-Q4_0.gguf"]
    with pytest.raises(ConfigError, match="several GGUF files end so: m-Q4_0, m-UD-Q4_0"):
        choose_gguf(files, "Q4_0", "org/m", "path")
    assert choose_gguf(files, "UD-Q4_0", "org/m", "path") == files[1:]
    assert choose_gguf(files[:1], "", "org/m", "path") == files[:1]


def test_a_cached_repository_of_gguf_files_is_found_offline(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    repository = home / "hub" / "models--org--m-GGUF"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    for kind in ("Q4_0", "Q8_0"):
        path = snapshot / f"m-{kind}.gguf"
        gguf_files.write(path, gguf_files.values(), gguf_files.tensors(kind))
    file = home / "fleet.yaml"
    file.write_text(MINIMAL.replace("path: m", "path: 'org/m-GGUF:Q8_0'"))
    found = Path(load_fleet(file, presets=PRESETS, environ={}).models[0].path)
    assert [p.name for p in found.glob("*.gguf")] == ["m-Q8_0.gguf"]
    file.write_text(MINIMAL.replace("path: m", "path: 'org/m-GGUF'"))
    with pytest.raises(ConfigError, match="name one by its end"):
        load_fleet(file, presets=PRESETS, environ={})


def test_models_of_the_catalogue_are_for_simulations_and_these_need_no_devices(home: Path) -> None:
    text = 'models: [{name: a, path: "catalogue:Llama-2-7b"}, {name: b, path: m}]\n'
    result = fault(home, text + "devices: [{budget: 64MiB}]")
    assert (result.key, result.value) == ("models[0].path", "catalogue:Llama-2-7b")
    assert "for simulations" in result.allowed
    assert fault(home, text).key == "devices"
    fleet = load_fleet(home / "fleet.yaml", presets=PRESETS, simulated=True)
    assert [m.path for m in fleet.models] == ["catalogue:Llama-2-7b", str(home / "m")]
    assert fleet.device.budget_bytes == 0


def test_devices_of_several_ranks_are_not_for_simulations(home: Path) -> None:
    file = home / "fleet.yaml"
    file.write_text(MINIMAL.replace("64MiB", "64MiB, tensor_parallel: 2"))
    assert load_fleet(file, presets=PRESETS).device.tensor_parallel == 2
    with pytest.raises(ConfigError, match=r"devices\[0\].tensor_parallel"):
        load_fleet(file, presets=PRESETS, simulated=True)


def test_a_device_says_how_its_kv_lies_and_what_it_computes(home: Path) -> None:
    one = "{budget: 64MiB}"
    assert load(home, MINIMAL).device.role is Role.BOTH

    def devices(*said: str) -> str:
        listed = (f"{{name: 'cpu:{i}', budget: 64MiB, {keys}}}" for i, keys in enumerate(said))
        return MINIMAL.replace(one, "\n  - ".join(listed))

    fleet = load(home, devices("role: prefill", "role: decode"))
    assert [d.role for d, _ in fleet.devices.values()] == [Role.PREFILL, Role.DECODE]
    for wrong, says in (
        (devices("role: prefill"), "another device has to decode"),
        (devices("role: decode", "role: decode"), "another device has to prefill"),
        (devices("role: prefill, prefix_cache: false", "role: both"), "prefix_cache"),
        (devices("role: prefill, tensor_parallel: 2", "role: both"), "one rank"),
        (devices("role: prefill", "role: neither"), "both"),
    ):
        found = fault(home, wrong)
        assert found.key.endswith("role")
        assert says in f"{found.allowed} {found}"


def test_a_gpu_is_named_by_its_number(home: Path) -> None:
    one = "budget: 64MiB"
    links = "links: [{bandwidth: 4GB/s}]"
    text = MINIMAL.replace(one, 'name: "cuda:1", lanes: 2, budget: 64MiB') + links
    fleet = load(home, text)
    assert (fleet.device.gpu, fleet.device.page_bytes) == (1, 2 * MiB)
    assert fleet.device.parts == 2
    assert fleet.link.bytes_per_second is None, "what paces CPUs does not pace a GPU"
    assert fleet.device.invariant is None
    for value, wanted in (("1", True), ("true", True), ("0", False)):
        text = MINIMAL.replace(one, f'name: "cuda:1", invariant: {value}, {one}')
        assert load(home, text).device.is_invariant is wanted
    assert load(home, MINIMAL).device.gpu is None
    for wrong, key in (
        ('name: "cuda:x"', "name"),
        ('name: "cuda"', "name"),
        ('name: "cuda:0", threads: 2', "threads"),
        ('name: "cuda:0", tensor_parallel: 2', "tensor_parallel"),
        ("tensor_parallel: 2, keep_free: 1MiB", "keep_free"),
        ("keep_free: -1", "keep_free"),
        ("tensor_parallel: 2, invariant: 1", "invariant"),
        ('name: "cuda:0", invariant: 2', "invariant"),
    ):
        found = fault(home, MINIMAL.replace(one, f"{wrong}, budget: 64MiB"))
        assert found.key == f"devices[0].{key}"
    link = 'links: [{device: "cuda:1", bandwidth: 4GB/s}]'
    assert fault(home, MINIMAL.replace(one, 'name: "cuda:1", budget: 64MiB') + link).key == (
        "links[0].bandwidth"
    )


def test_sampling_is_laid_over_the_defaults_and_bounded(home: Path) -> None:
    text = "defaults: {sampling: {temperature: 0.5, top_p: 0.9}}\n" + MINIMAL
    named = text.replace("path: m", "path: m, sampling: {temperature: 0, max_tokens: 100}")
    expected = SamplingDefaults(temperature=0, top_p=0.9, max_tokens=100)
    assert load(home, named).models[0].sampling == expected
    assert load(home, MINIMAL).models[0].sampling == SamplingDefaults()
    for key, value in {"temperature": 3, "top_p": 0, "max_tokens": 0, "top_k": -2}.items():
        error = fault(home, MINIMAL.replace("path: m", f"path: m, sampling: {{{key}: {value}}}"))
        assert error.key == f"models[0].sampling.{key}"
    error = fault(home, MINIMAL.replace("path: m", "path: m, sampling: {temprature: 1}"))
    assert "did you mean 'temperature'" in str(error)
