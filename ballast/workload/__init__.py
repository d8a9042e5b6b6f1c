"""Describe workloads: arrival time, model and token counts of each request.

Packages from `kernels` up may import it; `bench` does. It imports `core` only.

- `bursty`: Generate bursty workloads of many models, few in use at a time (Prism, 3 and A.1).
- `generators`: Synthetic arrivals (Poisson, gamma) and popularity (power law), by seed.
- `lengths`: Distributions of prompt and output lengths.
- `prompts`: Generate token ids for requests of which only lengths are known.
- `servegen`: Requests drawn from ServeGen's public client statistics.
- `stats`: Statistics of a workload: rates, burstiness, lengths, models in use at once.
- `trace_lines`: Line and column readers of trace files, with errors that name file and line.
- `traces`: Loaders of public serving traces.
- `workload`: `Workload` and `WorkloadRequest`, and pure transformations of them.
"""
