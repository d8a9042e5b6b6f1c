"""Describe workloads: arrival time, model and token counts of each request.

Packages from `kernels` up may import it; `bench` does. It imports `core` only.

- `block_traces`: Loaders of traces that name prompts by the hashes of their blocks.
- `bursty`: Generate bursty workloads of many models, few in use at a time (Prism, 3 and A.1).
- `cuts`: Cut requests to a number of tokens, and say what was cut.
- `generators`: Synthetic arrivals (Poisson, gamma) and popularity (power law), by seed.
- `lengths`: Distributions of prompt and output lengths.
- `prompts`: Generate token ids for requests of which only lengths are known.
- `servegen`: Requests drawn from ServeGen's public client statistics.
- `stats`: Statistics of a workload: rates, burstiness, lengths, models in use at once.
- `trace_lines`: The one reader of trace files: lines, CSV rows, times; errors name file and line.
- `trace_requests`: Collect the requests of a trace file, and what had to be filled in.
- `traces`: Loaders of public serving traces.
- `workload`: `Workload` and `WorkloadRequest`, and pure transformations of them.
"""
