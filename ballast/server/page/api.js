// Requests to the server that sent this page, as any client makes them.

// The keys that the user has typed: in these variables alone, and sent in headers alone.
const keys = { api: "", admin: "" };

export function useKeys(api, admin) {
  keys.api = api;
  keys.admin = admin;
}

export const hasAdminKey = () => keys.admin !== "";

// An answer with an error status; `status` 0: no answer.
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function request(path, key, init) {
  const headers = { ...init.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  let response;
  try {
    response = await fetch(path, { ...init, headers, credentials: "omit", redirect: "error", cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "the server does not answer");
  }
  if (response.ok) return response;
  let message = `status ${response.status}`;
  try {
    message = String((await response.json()).error.message);
  } catch { /* no error object */ }
  throw new ApiError(response.status, message);
}

export const read = async (path) => (await request(path, keys.api || keys.admin, {})).json();

const readAdmin = async (path) => (await request(`admin/${path}`, keys.admin || keys.api, {})).json();

export const readState = () => readAdmin("state");

export const readRequests = (last) => readAdmin(`requests?last=${last}`);

// Carry out an operator's order, such as `models/NAME/evict`.
export const order = (path) => request(`admin/${path}`, keys.admin, { method: "POST" });

// Stream a chat completion: yields its chunks, and comments as `{comment}`.
export async function* chat(body, signal) {
  const init = {
    method: "POST",
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    headers: { "content-type": "application/json" },
    signal,
  };
  const response = await request("v1/chat/completions", keys.api || keys.admin, init);
  for await (const line of lines(response.body)) {
    if (line.startsWith(":")) yield { comment: line.slice(1).trim() };
    if (!line.startsWith("data:")) continue;
    const data = line.slice(5).trim();
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(200, String(chunk.error.message));
    yield chunk;
  }
  throw new ApiError(0, "the stream ended early");
}

async function* lines(stream) {
  const reader = stream.getReader(), decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      const found = (rest + decoder.decode(value, { stream: !done })).split("\n");
      rest = found.pop();
      yield* found;
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
