"""Route HTTP requests: each module has the routes of one job, which ask the services and answer.

`app` alone imports it; it may import all of `server` but `app` and `serve`.

- `admin`: Routes `/admin/*` by which operators change what is served.
- `catalogue`: The fleet's models as clients see them.
- `generate`: Routes that generate, whole or streamed.
- `health`: Routes for liveness and readiness probes.
- `openapi_document`: `/openapi.json`: the schemas of answers.
- `state`: Routes that only report: `/metrics` and `/admin/state`.
- `texts`: Routes for tokenizing and embeddings.
"""
