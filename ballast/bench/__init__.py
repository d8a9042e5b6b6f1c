"""Run workloads, live and in virtual time, and report what came of them.

The command line may import it. It imports everything but `dashboard`.

- `cluster_run`: Run a workload on a simulated cluster.
- `demo_result`: The demo's results, live and in virtual time.
- `demo_terms`: The demo's budget, link, bursts and service levels.
- `demo`: `ballast demo`: presets compared live.
- `device_run`: A workload on a fleet, live or in virtual time.
- `device_search`: The fewest devices that meet a service level.
- `doctor_finding`: A finding of the doctor, and its cure.
- `doctor_fleet`: Doctor's checks of a fleet file.
- `doctor_gpus`: Doctor's checks of GPUs.
- `doctor_huge`: Doctor's check of huge pages, and what they bring here.
- `doctor_machine`: Doctor's checks of software, processor and limits.
- `doctor_memory`: Doctor's checks of memory and mappings.
- `doctor`: `ballast doctor`: is this machine fit for this fleet?
- `fairness`: Fairness of KV memory between models (MuxServe, Equation 2).
- `host_loading`: Load a fleet's models into a host tier.
- `http`: A benchmark target: a server that speaks the OpenAI API.
- `inprocess`: A live device in this process, for benchmarks.
- `machine_load`: Load of other processes while something was measured.
- `model_sizes`: Sizes of a fleet's models for simulations.
- `page_data`: The data of that page.
- `page`: Runs as one self-contained HTML page.
- `palette`: Colours that are distinct under colour blindness.
- `planning`: `ballast plan`: search of the fewest devices.
- `plot`: Runs as one picture.
- `progress`: Progress bars on stderr.
- `rate_search`: The highest arrival rate that meets a service level.
- `record`: Records of each request of a run.
- `replay`: Open-loop replay of a workload against a target.
- `report`: Latencies, service levels, throughput and memory of a run.
- `run_options`: Workload, service levels and options of a command line and a fleet file.
- `run`: One workload under several presets.
- `sample`: Samples and decisions of devices during a run.
- `server_process`: `ballast serve` as a child process, for benchmarks.
- `servers`: A workload on controllers and workers, without HTTP.
- `simulation_samples`: Samples of memory and queues during a simulation.
- `simulation_setup`: A simulation as its command line specifies it.
- `simulation`: `ballast simulate`.
- `stories`: Story files of runs.
- `story_report`: A run's report, from its story.
- `story_tables`: Stories as terminal text: two side by side, and what a replay did differently.
- `tables`: Reports as terminal tables.
- `timeline`: Memory and queue over time, for pictures.
- `verdict`: Runs of one workload compared in words.
"""
