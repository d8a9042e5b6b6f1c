"""Answer HTTP requests: text in, token ids to the worker, text out.

`bench`, `dashboard` and the command line may import it. It imports `cluster` and what is below; it
cannot see `sim`. Its process runs without PyTorch (`without_torch`).

- `access`: API keys: who may ask, how much, and how a server is shared between them.
- `admin`: Changes of what is served, by operators and by the fleet file.
- `app`: The ASGI application: routes, middleware, error handlers.
- `conversation`: Conversations as chat templates read them (its path is in `/openapi.json`).
- `generate`: From a checked request to its answer: parameters, constraints, choices.
- `http`: HTTP itself: connections, bodies, errors, the context of a request.
- `messages_api`: Anthropic's Messages API.
- `observe`: Metrics, traces, the log of requests, records of the server's state.
- `openai`: OpenAI's completions and chat APIs: requests, records, forms.
- `responses_api`: OpenAI's Responses API.
- `prompt_encoder`: From prompts and conversations to token ids.
- `routes`: Routes by job: generating, texts, administration, state, health.
- `serve`: A server from start to end: bind, start workers, answer, drain.
- `served_models`: The models that serve: by name or alias, each with its tokenizer.
- `service`: A client's request on its way to the devices: check, encode, submit.
- `structured`: Structured outputs: grammars of llguidance from JSON schemas.
- `text`: Text and tokens: tokenizers, chat templates, detokenization.
- `tools`: Tool calls: how model families write them, parsed and enforced.
- `without_torch`: Keeps PyTorch out of the server's process.
"""
