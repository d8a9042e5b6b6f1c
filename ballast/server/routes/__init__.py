"""Define the HTTP routes: each calls `Service` or `AdminService`, and writes the response.

`app` alone imports it; it may import all of `server` but `app` and `serve`.

- `adapters`: vLLM's routes that load and unload adapters.
- `admin`: Routes `/admin/*` by which operators change what is served.
- `answering`: Answers requests that generate, for the routes of all APIs.
- `catalogue`: Lists the fleet's models for clients.
- `generate`: Routes that generate, whole or streamed.
- `health`: Routes for liveness and readiness probes.
- `live`: `/admin/live`, the state as a stream of events.
- `ollama`: Routes of Ollama's API.
- `kv`: `/admin/kv`, the host's KV tiers.
- `memory`: `/admin/memory/release`, which gives free memory back to the machine.
- `openapi_document`: Adds schemas of responses to `/openapi.json`.
- `page`: The page at `/`.
- `simulations`: Routes that simulate and plan for the fleet, and play its story.
- `state`: Read-only routes: `/metrics`, `/admin/state` and `/admin/requests`.
- `texts`: Routes for tokenizing and embeddings.
"""
