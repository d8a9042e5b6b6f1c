// Reads the server's state once a second while the page is seen, and shows it to listeners.

import { ApiError, read, readRequests, readState } from "./api.js";

const SECONDS = 1;
const AGAIN_SECONDS = 2; // after a reading that failed
const LAST = 40; // requests that have ended
const CLOSED_SECONDS = 30; // until `/admin/state` is tried again with a key that does not open it

// What is known: `state` as `/admin/state` has it and `requests` as `/admin/requests`, or null where the key does not open them; then
// `listed` are the models of `/v1/models`. `trouble` says why there is nothing newer.
export class Readings {
  constructor() {
    this.state = this.requests = null;
    this.listed = [];
    this.trouble = "";
    this.wantsKey = false;
    this.rates = new Map(); // output tokens per second, by name
    this._before = null;
    this._closedUntil = 0;
    this._listeners = [];
    this._timer = 0;
    this._reading = false;
    document.addEventListener("visibilitychange", () => { if (!document.hidden) this.now(); });
  }

  listen(listener) { this._listeners.push(listener); }

  // Names that can be asked for, with what is known of each.
  get names() {
    if (this.state === null) return this.listed.map((m) => ({ name: m.id, status: m.status.value }));
    const served = this.state.models.flatMap((m) => m.names.map(({ name }) => ({ name, status: m.status })));
    return [...served, ...this.state.loading.map((l) => ({ name: l.model, status: "loading" }))];
  }

  statusOf(name) { return this.names.find((known) => known.name === name)?.status ?? ""; }

  // Read at once with another key, and go on from there.
  withNewKey() {
    this._closedUntil = 0;
    this.now();
  }

  // Read at once, and go on from there.
  async now() {
    clearTimeout(this._timer);
    if (this._reading) return;
    this._reading = true;
    await this._read();
    this._reading = false;
    for (const listener of this._listeners) listener(this);
    clearTimeout(this._timer);
    if (!document.hidden) this._timer = setTimeout(() => this.now(), (this.trouble ? AGAIN_SECONDS : SECONDS) * 1000);
  }

  async _read() {
    if (performance.now() < this._closedUntil) return this._list();
    try {
      const [state, requests] = await Promise.all([readState(), readRequests(LAST)]);
      this._rate(state);
      Object.assign(this, { state, requests, trouble: "", wantsKey: false });
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      if ([401, 403, 404].includes(error.status)) {
        this._closedUntil = performance.now() + CLOSED_SECONDS * 1000;
        await this._list();
      } else this.trouble = error.message;
    }
  }

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
