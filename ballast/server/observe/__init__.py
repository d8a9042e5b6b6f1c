"""Observe the server: metrics, traces, one log line for each request, and records of its state.

`server` alone imports it; `dashboard` and `bench` import the records of `server_state`, `dashboard`
those of `latency`, too.

- `device_metrics`: `/metrics` of devices: pages, models, and the pod for gateways.
- `kv_metrics`: `/metrics` of KV tiers.
- `latency`: Token times of one request, and recent latency quantiles.
- `memory_history`: Devices' memory over the last day, for `/admin/history`.
- `metric_names`: Names of metrics on export, and those of earlier releases.
- `metrics`: `/metrics` of requests.
- `recent_requests`: Records of `/admin/requests`.
- `request_log`: One log line for each request.
- `request_watch`: Middleware that follows each request for metrics, traces and logs.
- `server_state`: Records of `/admin/state`.
- `token_metrics`: Counters of tokens and inter-token gaps, by model.
- `tracing`: OpenTelemetry spans of requests.
"""
