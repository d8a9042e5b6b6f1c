"""Serve many language models from one elastic pool of device memory.

The modules here are the command line; all else is in the packages, listed from the bottom of the
import order to its top. A package imports only packages that stand before it in this list, and not
all of these: `[tool.importlinter]` in `pyproject.toml` has the levels.

- `core`: The vocabulary: requests, events, actions, views, settings, errors.
- `residency`: The order of the copies by which passes stream layers that are not resident.
- `memory`: Pages of a device, their owners and mappings, and transfers between host and device.
- `policy`: Pure scheduling, memory and placement policies, and the presets made of them.
- `workload`: Traces and synthetic workloads: which request arrives when, of how many tokens.
- `fleet`: The fleet file: its schema, operators' changes to it, and small fleets made for demos.
- `isolation`: Resource-limited child processes for untrusted files.
- `kernels`: CPU (Numba) and GPU (Triton) kernels: paged attention, linear layers, LoRA, sampling.
- `weights`: Checkpoints, the host tier of weights, and weights on a device.
- `kv`: The paged KV cache of one model: blocks, prefix cache, layouts, swapping.
- `models`: Model executors: any `transformers` decoder, and the fused path of Llama-shaped ones.
- `engine`: The loop of one device: state, scheduling, jobs, the same live and in virtual time.
- `transport`: Messages between processes, and the sockets that carry them.
- `control`: The controller's state machines: requests of a device, their routes and migrations.
- `live`: One device on real hardware: its memory and link, threads that run jobs, its clock.
- `cluster`: Worker processes, and the controller that routes requests to them.
- `server`: The HTTP server: OpenAI's and Anthropic's APIs, metrics, administration.
- `sim`: The same engine in virtual time, on modelled devices.
- `bench`: Runs, measurements, reports and plots of workloads, live and in virtual time.
- `dashboard`: The terminal display of `ballast top`.
- `cli`: The `ballast` command: its options and groups of subcommands.
- `cli_bench`: `ballast bench`, `demo`, `profile` and `show`.
- `cli_common`: What several subcommands share: loading a fleet, writing JSON.
- `cli_fleet`: `ballast fleet make`.
- `cli_kv`: `ballast kv list`, `resize` and `scrub`.
- `cli_place`: `ballast place`.
- `cli_serve`: `ballast serve`, `doctor`, `ps`, `top`, `drain` and `release`.
- `cli_simulate`: `ballast simulate`, `plan` and `arrivals`.
- `cli_story`: `ballast replay` and `compare`.
- `__main__`: `python -m ballast`.
"""

import os

# Read by PyTorch's OpenMP runtime when it is loaded. By default its threads spin while they wait
# for each other; beside a server process, or anything else, on the same cores, a step then takes
# many times as long. Whoever has cores to spare may set `active`.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

__version__ = "0.2.0"
