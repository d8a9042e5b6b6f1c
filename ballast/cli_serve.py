"""The commands about a server: check the machine, serve, watch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ballast.cli_common import HERE, FleetFile, Key, Url, importing, load, ordered, with_preset
from ballast.core.errors import ConfigError

if TYPE_CHECKING:
    from ballast.cluster.hosts.hosted_workers import RayHosts
    from ballast.cluster.worker.early_process import EarlyProcess
    from ballast.core.settings import FleetSettings, ServerSettings

log = getLogger(__name__)

UNCHANGED_SECONDS = 10.0
"""Time after which the log of a start repeats a line that is still true."""


def doctor(
    fleet_file: Annotated[
        Path | None, typer.Argument(metavar="[FLEET.yaml]", help="Also check this fleet.")
    ] = None,
) -> None:
    """Check this machine, and optionally a fleet file; exit code 1 if something cannot work."""
    from rich.console import Console

    from ballast.bench.progress import shown

    fleet = None if fleet_file is None else load(fleet_file, partial=True)
    with importing():
        from ballast.bench.doctor import examine, table
        from ballast.bench.doctor_finding import Verdict
        from ballast.live.inbox import MonotonicClock

    findings = []
    with shown() as progress:
        for finding in examine(fleet, MonotonicClock()):
            findings.append(finding)
            progress("checks done", len(findings), note=f"last {finding.check}")
    Console().print(table(findings))
    if any(finding.verdict is Verdict.FAIL for finding in findings):
        raise typer.Exit(1)


BindHost = Annotated[str, typer.Option(help="Address to bind; loopback by default.")]
BindPort = Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")]
PresetInstead = Annotated[str | None, typer.Option(help="Instead of the fleet file's.")]
StoryAppend = Annotated[
    Path | None,
    typer.Option(help="Append every event and decision to this file, as JSON lines."),
]
DrainSeconds = Annotated[
    float | None,
    typer.Option(min=0, help="For open requests, after SIGTERM; default: the file's."),
]
ApiKey = Annotated[
    str | None,
    typer.Option(envvar="BALLAST_API_KEY", help="A key that opens all models, beside any."),
]
WithoutKeys = Annotated[
    bool,
    typer.Option(
        "--without-keys",
        envvar="BALLAST_WITHOUT_KEYS",
        help="Let everybody who reaches the address use the server.",
    ),
]
ChangesFile = Annotated[
    Path | None,
    typer.Option(
        envvar="BALLAST_CHANGES",
        help="Keep operators' changes here; default: FLEET.changes.json.",
    ),
]
NoChanges = Annotated[
    bool, typer.Option("--no-changes", help="Forget operators' changes at the end.")
]
LogLevel = Annotated[str, typer.Option(help="debug, info, warning or error.")]
LogFormat = Annotated[str, typer.Option(envvar="BALLAST_LOG_FORMAT", help="text or json.")]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS",
        help="Devices on the nodes of this Ray cluster: HOST:PORT, auto; default: the file's.",
    ),
]
HostsHttp = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=65535,
        metavar="PORT",
        help="Answer HTTP at this port of each node of Ray as well; default: the file's.",
    ),
]
OtlpEndpoint = Annotated[
    str | None,
    typer.Option(help="Send traces to this OpenTelemetry collector: http://HOST:4318."),
]


def serve(
    fleet_file: FleetFile,
    host: BindHost = "127.0.0.1",
    port: BindPort = 8000,
    preset: PresetInstead = None,
    story: StoryAppend = None,
    drain_seconds: DrainSeconds = None,
    api_key: ApiKey = None,
    without_keys: WithoutKeys = False,
    changes: ChangesFile = None,
    no_changes: NoChanges = False,
    log_level: LogLevel = "info",
    log_format: LogFormat = "text",
    otlp_endpoint: OtlpEndpoint = None,
    ray: RayAddress = None,
    hosts_http: HostsHttp = None,
) -> None:
    """Serve a fleet over HTTP (the OpenAI API)."""
    early = _begin(log_format, log_level, here=ray is None and hosts_http is None)
    from ballast.bench.progress import lines_to
    from ballast.fleet.fleet_source import FleetSource
    from ballast.policy.presets import PRESETS
    from ballast.server.http.address import check_closed

    def adjust(fleet: FleetSettings) -> FleetSettings:
        """Override the file's settings with the command line's."""
        fleet = with_preset(fleet, preset)
        path = fleet.story_path if story is None else str(story)
        server = _with_options(fleet.server, drain_seconds, api_key)
        fleet = replace(fleet, story_path=path, server=server)
        if not without_keys:
            check_closed(host, fleet.server, _hosts_http(hosts_http, fleet))
        return fleet

    kept = None if no_changes else changes or fleet_file.with_suffix(".changes.json")
    source = FleetSource(fleet_file, presets=PRESETS, changes=kept, adjust=adjust)
    owned = nullcontext() if early is None else closing(early)
    with owned, lines_to(lambda line: log.info("%s", line), UNCHANGED_SECONDS) as lines:
        lines.at("starting: reading the fleet file", 0)
        reading = source.read()
        hosts_http = _hosts_http(hosts_http, reading.fleet)  # whatever is read again: `adjust`
        cluster = _ray_of(ray, hosts_http, reading.fleet, fleet_file)
        log.info("starting %s", reading.fleet.described)
        lines.at("starting: loading libraries", 0)
        from ballast.server.serve import serve as run  # takes seconds: the file is judged before

        code = run(
            source,
            host,
            port,
            ready=lambda port: lines.over.set(),
            progress=lambda text: lines.at("loading models", 0, note=text),
            reading=reading,
            otlp_endpoint=otlp_endpoint,
            ray=cluster,
            own_process=True,
            early=early,
        )
    raise typer.Exit(code)


def _begin(log_format: str, log_level: str, *, here: bool) -> EarlyProcess | None:
    """Set up logs, and start the first worker's process, if devices are `here`: it imports beside
    the server's imports. None: it starts with the others."""
    from ballast.cluster.logs import set_up_logs
    from ballast.cluster.worker.early_process import EarlyProcess

    set_up_logs("server", log_format, log_level)
    with suppress(OSError):
        return EarlyProcess() if here else None
    return None


def _hosts_http(port: int | None, fleet: FleetSettings) -> int | None:
    """Return the port at which hosts are to answer HTTP."""
    return fleet.hosts.http if port is None and fleet.hosts is not None else port


def _ray_of(
    address: str | None, hosts_http: int | None, fleet: FleetSettings, file: Path
) -> RayHosts | None:
    """Return the Ray cluster of a fleet; None: it is served on this machine, which has what it
    needs. Raises ConfigError."""
    http = _hosts_http(hosts_http, fleet)
    if address is None and fleet.hosts is not None:
        address = fleet.hosts.ray
    if address:
        from ballast.cluster.hosts.hosted_workers import RayHosts, fleet_id

        named = "" if fleet.hosts is None else fleet.hosts.fleet
        return RayHosts(address, http, fleet_id(file, named))
    if http is not None:
        raise ConfigError("hosts.http", http, "it needs a Ray cluster: `hosts.ray`, or --ray")
    _check_here(fleet)
    return None


def _check_here(fleet: FleetSettings) -> None:
    """Check a fleet against this machine. Raises ConfigError."""
    from ballast.cluster.machine_check import check_machine, memory_warning

    check_machine(fleet)
    if (warning := memory_warning(fleet)) is not None:
        log.warning(warning)


def _with_options(
    server: ServerSettings, drain_seconds: float | None, api_key: str | None
) -> ServerSettings:
    """Return `server` with the command line's options. Raises ConfigError."""
    from ballast.core.settings import KeySettings
    from ballast.fleet.faults import HIDDEN
    from ballast.fleet.field_types import secret_text
    from ballast.server.http.origins import check_origins

    if drain_seconds is not None:
        server = replace(server, drain_seconds=drain_seconds)
    if api_key:
        try:
            secret_text(api_key)
        except ValueError as error:
            raise ConfigError("--api-key", HIDDEN, str(error)) from error
        secret = KeySettings(name="default", key=api_key)
        same = [k.name for k in server.keys if k.name == secret.name or k.key == api_key]
        if same or server.admin_key == api_key:
            where = same[0] if same else "admin_key"
            raise ConfigError("--api-key", HIDDEN, f"the fleet file has it already: {where}")
        server = replace(server, keys=(*server.keys, secret))
    check_origins(server)
    return server


def ps(
    url: Url = HERE,
    key: Key = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print the whole state as one line of JSON.")
    ] = False,
) -> None:
    """List a server's models: their state, memory, queues and latencies now.

    Exit code 1 if the server does not answer or refuses the key.
    """
    import asyncio

    from rich.console import Console

    from ballast.dashboard import top as screen

    console = Console(highlight=False)
    with _readable(url):
        if json:
            asyncio.run(screen.lines(url, key, 0.0, forever=False))
        else:
            asyncio.run(screen.listing(url, key, console))


def top(
    url: Url = HERE,
    key: Key = None,
    interval: Annotated[float, typer.Option(min=0.05, help="Seconds between readings.")] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="One frame, as text; so too where there is no terminal.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Readings as lines of JSON; with --once, one.")
    ] = False,
) -> None:
    """Watch a server: memory, models, queues, latencies and the last decisions.

    With --once and --json, exit code 1 if the server does not answer or refuses the key.
    """
    import asyncio

    from rich.console import Console

    from ballast.dashboard import top as screen

    console = Console(highlight=False)
    with _readable(url):
        if json:
            asyncio.run(screen.lines(url, key, interval, forever=not once))
        elif once or not console.is_terminal:
            asyncio.run(screen.once(url, key, interval, console))
        else:
            asyncio.run(screen.live(url, key, interval, console))


@contextmanager
def _readable(url: str) -> Iterator[None]:
    """End the command with a line where a server's state cannot be read, or at Ctrl-C."""
    from ballast.dashboard.reader import Unreadable

    try:
        yield
    except Unreadable as error:
        print(f"ballast: {url}: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def drain(
    device: Annotated[
        str, typer.Argument(metavar="DEVICE|HOST", help="Its name, as in the fleet file or in Ray.")
    ],
    url: Url = HERE,
    key: Key = None,
    undo: Annotated[
        bool, typer.Option("--undo", help="It takes requests again (also called uncordon).")
    ] = False,
) -> None:
    """Empty a device, or all devices of a host, for maintenance: models go to others, and so do
    requests, in the middle of their answers; nothing comes there until --undo.

    Exit code 1 if it cannot be done, with the reason; nothing has changed then.
    """
    from urllib.parse import quote

    wanted = "uncordon" if undo else "drain"
    document = ordered(url, key, f"devices/{quote(device, safe='')}/{wanted}")
    print(f"{device} is {document['status']}")


def release(
    devices: Annotated[
        list[str] | None,
        typer.Argument(metavar="DEVICE", help="Names, as in the fleet file; default: all."),
    ] = None,
    keep: Annotated[
        str, typer.Option(metavar="SIZE", help="Free memory that each of them keeps, as 512MiB.")
    ] = "0",
    url: Url = HERE,
    key: Key = None,
) -> None:
    """Give the memory of free pages back to the machine now; it is taken again when it is needed.

    Exit code 1 if a device did not, with the reason.
    """
    from ballast.core.units import format_bytes

    wanted: dict[str, object] = {"keep": keep}
    if devices:
        wanted["devices"] = devices
    document = ordered(url, key, "memory/release", wanted)
    for device, n_bytes in document["released"].items():
        print(f"{device} has given {format_bytes(n_bytes)} back")
    for device, why in document["refused"].items():
        print(f"ballast: {device}: {why}", file=sys.stderr)
    if document["refused"]:
        raise typer.Exit(1)
