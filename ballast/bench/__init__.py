"""Run workloads, live and in virtual time, and report what came of them.

The command line may import it. It imports everything but `dashboard`.

- `asked`: A simulation as its command line specifies it.
- `choose`: Workload, service levels and options of a command line and a fleet file.
- `clusters`: Run a workload on a simulated cluster.
- `compare`: Two stories side by side, up to their first difference.
- `demo`: `ballast demo`: presets compared live.
- `demo_result`: The demo's results, live and in virtual time.
- `demo_terms`: The demo's budget, link, bursts and service levels.
- `doctor`: `ballast doctor`: is this machine fit for this fleet?
- `doctor_fleet`: Doctor's checks of a fleet file.
- `doctor_gpus`: Doctor's checks of GPUs.
- `doctor_huge`: Doctor's check of huge pages, and what they bring here.
- `doctor_machine`: Doctor's checks of software, processor and limits.
- `doctor_memory`: Doctor's checks of memory and mappings.
- `fairness`: Fairness of KV memory between models (MuxServe, Equation 2).
- `fewest`: The fewest devices that meet a service level.
- `finding`: A finding of the doctor, and its cure.
- `gauge`: Samples of memory and queues during a simulation.
- `http`: A benchmark target: a server that speaks the OpenAI API.
- `inprocess`: A live device in this process, for benchmarks.
- `loading`: Load a fleet's models into a host tier.
- `others`: Load of other processes while something was measured.
- `page`: Runs as one self-contained HTML page.
- `page_data`: The data of that page.
- `palette`: Colours that are distinct under colour blindness.
- `planning`: `ballast plan`: search of the fewest devices.
- `plot`: Runs as one picture.
- `progress`: Progress bars on stderr.
- `record`: Records of each request of a run.
- `replay`: Open-loop replay of a workload against a target.
- `report`: Latencies, service levels, throughput and memory of a run.
- `retelling`: The result of replaying a story, in words.
- `run`: One workload under several presets.
- `sample`: Samples and decisions of devices during a run.
- `search`: The highest arrival rate that meets a service level.
- `servers`: A workload on controllers and workers, without HTTP.
- `serving`: `ballast serve` as a child process, for benchmarks.
- `show`: Reports as terminal tables.
- `simulating`: `ballast simulate`.
- `sizes`: Sizes of a fleet's models for simulations.
- `stories`: Story files of runs.
- `telling`: A run's report, from its story.
- `timeline`: Memory and queue over time, for pictures.
- `verdict`: Runs of one workload compared in words.
- `worlds`: A workload on a fleet, live or in virtual time.
"""
