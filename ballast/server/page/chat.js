// A conversation with one model, or the same one with two side by side.

import { ApiError, chat } from "./api.js";
import { byId, element, write } from "./dom.js";
import { rate, seconds } from "./format.js";

const MOST_TURNS = 100; // turns that stay on the page

// One answer as it comes: its texts, and what a user would feel of it.
class Answer {
  constructor(model, readings) {
    this._readings = readings;
    this._model = model;
    this._began = performance.now();
    this._first = null;
    this._text = document.createTextNode("");
    this._thought = document.createTextNode("");
    this._note = element("p", { class: "small" });
    this._thoughts = element("details", { hidden: true }, element("summary", { text: "Reasoning" }), element("p", { class: "text" }, this._thought));
    this.root = element("div", { class: "answer" }, element("h3", { text: model }), this._thoughts,
      element("p", { class: "text" }, this._text), this._note);
    this._timer = setInterval(() => this._wait(), 200);
    this._loading = "";
    this._usage = null;
    this._reason = null;
    this._wait();
  }

  get text() { return this._text.data; }

  _wait() {
    const status = this._loading || { evicted: "its weights are brought in", loading: "it is loaded" }[this._readings.statusOf(this._model)] || "";
    write(this._note, `waiting ${seconds(this._elapsed)}${status ? `, ${status}` : ""}`);
  }

  get _elapsed() { return (performance.now() - this._began) / 1000; }

  // Write an answer into the page chunk by chunk; returns whether it can be gone on from.
  async run(request, signal) {
    try {
      for await (const chunk of chat({ ...request, model: this._model }, signal)) this._add(chunk);
      this._end("");
    } catch (error) {
      if (error.name === "AbortError") this._end("stopped");
      else if (error instanceof ApiError) this._end(error.message, true);
      else { this._end("this page failed", true); throw error; }
    }
    return this.text !== "";
  }

  _add(chunk) {
    if (chunk.comment) this._loading = chunk.comment === "ping" ? "" : chunk.comment;
    if (chunk.usage) this._usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const { content, reasoning_content: thought } = choice.delta;
    if (content || thought) this._begin();
    if (thought) {
      this._thoughts.hidden = false;
      this._thought.appendData(thought);
    }
    if (content) this._text.appendData(content);
    this._reason = choice.finish_reason ?? this._reason;
  }

  _begin() {
    if (this._first !== null) return;
    this._first = this._elapsed;
    clearInterval(this._timer);
    write(this._note, `first token after ${seconds(this._first)}`);
  }

  _end(why, failed = false) {
    clearInterval(this._timer);
    const parts = [];
    if (this._first !== null) parts.push(`first token after ${seconds(this._first)}`);
    if (this._usage) {
      const { prompt_tokens: prompt, completion_tokens: tokens, prompt_tokens_details: details } = this._usage;
      const passed = this._elapsed - (this._first ?? 0);
      parts.push(`${tokens} tokens`);
      if (tokens > 1 && passed > 0) parts.push(`${rate((tokens - 1) / passed)} tokens/s`);
      parts.push(`${details.cached_tokens} of ${prompt} prompt tokens cached`);
    }
    if (this._reason && this._reason !== "stop") parts.push(`ended by ${this._reason}`);
    if (why) parts.push(why);
    write(this._note, parts.join(" · "));
    this._note.classList.toggle("failed", failed);
  }
}

export class Conversation {
  constructor(readings) {
    this._readings = readings;
    this._histories = [[], []]; // messages, of each side
    this._stopping = null;
    byId("ask").addEventListener("submit", (event) => { event.preventDefault(); this._ask(); });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      byId("ask").requestSubmit();
    });
    byId("stop").addEventListener("click", () => this._stopping?.abort());
    byId("clear").addEventListener("click", () => this._clear());
  }

  _clear() {
    this._stopping?.abort();
    this._histories = [[], []];
    byId("turns").replaceChildren();
    byId("prompt").focus();
  }

  async _ask() {
    const text = byId("prompt").value, models = [byId("model").value, byId("beside").value];
    if (this._stopping || !text.trim() || !models[0]) return;
    byId("prompt").value = "";
    const stopping = (this._stopping = new AbortController());
    byId("send").disabled = true;
    byId("stop").disabled = false;
    const answers = models.map((model) => (model ? new Answer(model, this._readings) : null));
    const turn = element("div", {}, element("p", { class: "asked", text }),
      element("div", { class: "answers" }, ...answers.filter(Boolean).map((answer) => answer.root)));
    const turns = byId("turns");
    turns.append(turn);
    while (turns.children.length > MOST_TURNS) turns.firstElementChild.remove();
    turns.scrollTop = turns.scrollHeight;
    const scrolling = setInterval(() => {
      if (turns.scrollHeight - turns.scrollTop - turns.clientHeight < 120) turns.scrollTop = turns.scrollHeight;
    }, 200);
    const histories = this._histories;
    await Promise.allSettled(answers.map((answer, side) => answer && this._run(answer, histories[side], text, stopping.signal)));
    clearInterval(scrolling);
    this._stopping = null;
    byId("send").disabled = false;
    byId("stop").disabled = true;
  }

  // A turn that brought no answer is no part of the conversation.
  async _run(answer, history, text, signal) {
    const asked = { role: "user", content: text }, system = byId("system").value.trim();
    const before = system ? [{ role: "system", content: system }] : [];
    const request = { messages: [...before, ...history, asked] };
    if (byId("most").value !== "") request.max_tokens = Number(byId("most").value);
    if (byId("temperature").value !== "") request.temperature = Number(byId("temperature").value);
    if (await answer.run(request, signal)) history.push(asked, { role: "assistant", content: answer.text });
  }
}
