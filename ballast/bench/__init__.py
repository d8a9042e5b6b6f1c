"""Run workloads, live and in virtual time, and report latencies, service levels and memory.

The command line may import it. It imports everything but `dashboard`.

- `cluster_run`: Run a workload on a simulated cluster.
- `demo_result`: The demo's results, live and in virtual time.
- `demo_terms`: Choose the demo's budget, link, bursts and service levels.
- `demo`: `ballast demo`: presets compared live.
- `device_run`: A workload on a fleet, live or in virtual time.
- `device_search`: Search the fewest devices that meet a service level.
- `doctor_finding`: A finding of the doctor, and its cure.
- `doctor_fleet`: Doctor's checks of a fleet file.
- `doctor_gpus`: Doctor's checks of GPUs.
- `doctor_huge`: Doctor's check of huge pages and their measured benefit.
- `doctor_machine`: Doctor's checks of software, processor and limits.
- `doctor_memory`: Doctor's checks of memory and mappings.
- `doctor`: `ballast doctor`: is this machine fit for this fleet?
- `fairness`: Fairness of KV memory between models (MuxServe, Equation 2).
- `host_loading`: Load a fleet's models into a host tier.
- `http_profile`: Costs of the engine behind a server on this machine.
- `http`: Benchmark target: a server, over the OpenAI API.
- `inprocess`: A live device in this process, for benchmarks.
- `machine_load`: CPU time of other processes during a measurement.
- `model_sizes`: Sizes of a fleet's models for simulations.
- `page_data`: Data from which the page's script draws.
- `page`: Runs as one self-contained HTML page.
- `palette`: Colours that are distinct under colour blindness.
- `planning`: `ballast plan`: search of the fewest devices.
- `plot`: Runs as one picture.
- `progress`: Progress bars on stderr.
- `rate_search`: Search the highest arrival rate that meets a service level.
- `record`: Record sending, tokens and end of each request of a run.
- `replay`: Open-loop replay of a workload against a target.
- `report`: Latencies, service levels, throughput and memory of a run.
- `run_options`: Workload, service levels and options of a command line and a fleet file.
- `run`: One workload under several presets.
- `sample`: Samples and decisions of devices during a run.
- `server_process`: `ballast serve` as a child process, for benchmarks.
- `servers`: Run a workload on controllers and workers, without HTTP.
- `simulation_samples`: Samples of memory and queues during a simulation.
- `simulation_setup`: Build a simulation's inputs from its command line.
- `simulation`: `ballast simulate`: a workload on simulated devices under each preset.
- `stories`: Story files of runs.
- `story_report`: Rebuild a run's report from its story.
- `story_tables`: Stories as terminal text: two side by side, and differences in a replay.
- `tables`: Reports as terminal tables.
- `timeline`: Memory and queue over time, for pictures.
- `trace_part`: The part of a trace that a command line asks for: models, start, seconds and rate.
- `verdict`: Runs of one workload compared in words.
"""
