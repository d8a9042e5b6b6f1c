"""Implement OpenAI's completions and chat APIs: request schemas, response records and forms.

`server` alone imports it; `messages_api` and `responses_api` translate their requests to these.

- `collected`: Collects whole answers, as text and JSON, while their pieces arrive.
- `forms`: Answers of the completions and chat APIs, whole or streamed.
- `records`: Response records of the OpenAI API, encoded by msgspec.
- `request`: Schemas of OpenAI's generating requests, with vLLM's extensions.
- `text_request`: Schemas of requests for tokenizing and embeddings.
- `translation`: Translates other APIs' requests to chat requests: the shared parts.
"""
