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

export const readHistory = (seconds) => readAdmin(`history?seconds=${seconds}`);

export const readStory = (last) => readAdmin(`story?last=${last}`);

// The server's state, once a second: yields what has changed since the last one.
export async function* live(signal) {
  const response = await request("admin/live", keys.admin || keys.api, { signal });
  for await (const data of dataOf(response)) yield JSON.parse(data);
}

// Run a simulation (`simulate`, `plan`, `story/play`): yields how far it is, returns its result.
export async function* simulate(what, body, signal) {
  const init = { method: "POST", signal, ...(body && { body: JSON.stringify(body), headers: { "content-type": "application/json" } }) };
  let last = { event: "error", message: "the stream ended early" };
  for await (const data of dataOf(await request(`admin/${what}`, keys.admin, init))) {
    if (data === "[DONE]") break;
    last = JSON.parse(data);
    if (last.event === "progress") yield last;
  }
  if (last.event !== "result") throw new ApiError(200, String(last.message ?? "the stream ended early"));
  return last.result;
}

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
  for await (const data of dataOf(response, true)) {
    if (data.startsWith(":")) {
      yield { comment: data.slice(1).trim() };
      continue;
    }
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(200, String(chunk.error.message));
    yield chunk;
  }
  throw new ApiError(0, "the stream ended early");
}

// The data of a stream's events, each of one line; `comments`: with comments, which begin with a colon.
async function* dataOf(response, comments = false) {
  for await (const line of lines(response.body)) {
    if (line.startsWith("data:")) yield line.slice(5).trim();
    else if (comments && line.startsWith(":")) yield line;
  }
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
