"""Answer HTTP requests: text in, token ids to the worker, text out.

`bench`, `dashboard` and the command line may import it. It imports `cluster` and what is below; it
cannot see `sim`. Its process runs without PyTorch (`without_torch`).

- `access`: API keys: authentication, quotas, and fair shares of the server between keys.
- `admin`: Changes of the fleet, by operators and by the fleet file.
- `app`: The ASGI application: routes, middleware, error handlers.
- `conversation`: Fields of conversations in requests (its path is in `/openapi.json`).
- `fleet_loader`: Starts the devices and loads the fleet's models, while the server answers.
- `generate`: Answers of checked requests: parameters, constraints, choices, embeddings.
- `http`: HTTP itself: connections, bodies, errors, the context of a request.
- `http_server`: The HTTP server: the application within what guards it.
- `messages_api`: Anthropic's Messages API.
- `model_loads`: Models that are not served yet, and the requests that wait for them.
- `observe`: Metrics, traces, the log of requests, records of the server's state.
- `ollama_api`: Ollama's API: requests, records, forms.
- `operator_signals`: What an operator's signals ask of a server.
- `openai`: OpenAI's completions and chat APIs: requests, records, forms.
- `responses_api`: OpenAI's Responses API.
- `prompt_encoder`: Encodes prompts and conversations as token ids.
- `restart`: Restarts a server in place, with its weights and its listening socket.
- `routes`: HTTP routes: generation, texts, administration, state, health.
- `serve`: Runs a server: bind, start workers, answer, drain.
- `served_models`: Looks up models by name or alias, with their tokenizers.
- `service`: Checks and encodes a client's request, and submits it to the devices.
- `structured`: Structured outputs: grammars of llguidance from JSON schemas.
- `text`: Text and tokens: tokenizers, chat templates, detokenization.
- `tools`: Tool calls: parsed and enforced in the syntax of each model family.
- `without_torch`: Keeps PyTorch out of the server's process.
"""
