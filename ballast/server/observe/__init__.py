"""Show what the server does: health, metrics, traces, one log line for each request, models.

`server` alone imports it, and `dashboard` the records of `server_state`.

- `catalogue`: The fleet's models as clients see them.
- `device_metrics`: `/metrics` of devices: pages, models, and the pod for gateways.
- `health`: Routes for liveness and readiness probes.
- `latency`: Token times of one request, and recent latency quantiles.
- `metrics`: `/metrics` of requests, under vLLM's names.
- `request_log`: One log line for each request.
- `request_watch`: Middleware that follows each request for metrics, traces and logs.
- `routes`: Routes that only report: `/metrics` and `/admin/state`.
- `server_state`: Records of `/admin/state`.
- `token_metrics`: Counters of tokens and inter-token gaps, by model.
- `tracing`: OpenTelemetry spans of requests.
"""
