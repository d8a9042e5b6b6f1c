// Follows the server's state while the page is seen, and shows it to listeners.

import { ApiError, live, read } from "./api.js";

const AGAIN_SECONDS = 2; // after a stream that ended, or models that were listed
const SILENT_SECONDS = 15; // without an event of a stream that has one a second
const CLOSED_SECONDS = 30; // until `/admin/live` is tried again with a key that does not open it

// What is known: `state` as `/admin/state` has it and `requests` as `/admin/requests`, or null where the key does not open them; then
// `listed` are the models of `/v1/models`. `trouble` says why there is nothing newer.
export class Readings {
  constructor() {
    this.state = this.requests = null;
    this.listed = [];
    this.trouble = "";
    this.wantsKey = false;
    this.rates = new Map(); // output tokens per second, by name
    this._models = new Map(); // as last sent, by name
    this._before = null;
    this._closedUntil = 0;
    this._listeners = [];
    this._stopping = null;
    this._hurries = false; // whether to begin anew at once
    this._wake = () => {};
    document.addEventListener("visibilitychange", () => (document.hidden ? this._stopping?.abort() : this._wake()));
  }

  listen(listener) { this._listeners.push(listener); }

  // Names that can be asked for, with what is known of each.
  get names() {
    if (this.state === null) return this.listed.map((m) => ({ name: m.id, status: m.status.value }));
    const served = this.state.models.flatMap((m) => m.names.map(({ name }) => ({ name, status: m.status })));
    return [...served, ...this.state.loading.map((l) => ({ name: l.model, status: "loading" }))];
  }

  statusOf(name) { return this.names.find((known) => known.name === name)?.status ?? ""; }

  // Begin anew with another key.
  withNewKey() {
    this._closedUntil = 0;
    this._hurries = true;
    this._stopping?.abort();
    this._wake();
  }

  // Follow the server for ever.
  async follow() {
    for (;;) {
      if (!document.hidden) await (performance.now() < this._closedUntil ? this._list() : this._stream());
      this._show();
      if (this._hurries) {
        this._hurries = false;
        continue;
      }
      await new Promise((resolve) => {
        this._wake = resolve;
        if (!document.hidden) setTimeout(resolve, AGAIN_SECONDS * 1000);
      });
    }
  }

  async _stream() {
    const stopping = (this._stopping = new AbortController());
    let silence, silent = false;
    const heard = () => {
      clearTimeout(silence);
      silence = setTimeout(() => { silent = true; stopping.abort(); }, SILENT_SECONDS * 1000);
    };
    heard();
    this._models.clear();
    try {
      for await (const event of live(stopping.signal)) {
        heard();
        this._take(event);
        this._show();
      }
    } catch (error) {
      if ([401, 403, 404].includes(error.status)) {
        this._closedUntil = performance.now() + CLOSED_SECONDS * 1000;
        await this._list();
      } else if (silent || !stopping.signal.aborted) this.trouble = error instanceof ApiError ? error.message : "the server does not answer";
    } finally {
      clearTimeout(silence);
    }
  }

  _take({ state, models, order, open, ended, decisions }) {
    for (const [name, model] of Object.entries(models)) this._models.set(name, model);
    order ??= this.state.models.map((model) => model.report.name);
    state.models = order.map((name) => this._models.get(name));
    state.decisions = decisions ?? this.state.decisions;
    const seen = ended ? { ended, endedAt: performance.now() } : { ended: this.requests.ended, endedAt: this.requests.endedAt };
    this._rate(state);
    Object.assign(this, { state, requests: { open, ...seen }, trouble: "", wantsKey: false });
  }

  _show() { for (const listener of this._listeners) listener(this); }

  async _list() {
    this.state = this.requests = null;
    try {
      this.listed = (await read("v1/models")).data;
      Object.assign(this, { trouble: "", wantsKey: false });
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.listed = [];
      this.trouble = error.message;
      this.wantsKey = error.status === 401;
    }
  }

  // Rates begin anew where the server has started again.
  _rate(state) {
    const tokens = new Map(state.models.flatMap((m) => m.names.map((n) => [n.name, n.tokens])));
    const before = this._before;
    this._before = { uptime: state.uptime, tokens };
    this.rates = new Map();
    if (before === null || state.uptime <= before.uptime) return;
    const passed = state.uptime - before.uptime;
    for (const [name, n] of tokens) this.rates.set(name, Math.max(0, n - (before.tokens.get(name) ?? 0)) / passed);
  }
}
