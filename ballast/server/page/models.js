// The table of models: state, requests, memory, latencies against their levels, an operator's orders.

import { order } from "./api.js";
import { arrange, byId, element, options, write } from "./dom.js";
import { bytes, rate, seconds } from "./format.js";
import { colourOf } from "./strip.js";

const HEADS = [["model", "word"], ["state", "word"], ["running", ""], ["waiting", ""], ["tokens/s", ""], ["weights", ""],
  ["KV", ""], ["TTFT p50", ""], ["p99", ""], ["TPOT p50", ""], ["p99", ""]];

class ModelRow {
  constructor(name, refused) {
    this._name = name;
    this._refused = refused;
    this._swatch = element("span", { class: "swatch" });
    this._cells = HEADS.map(([, kind]) => element("td", { class: kind }));
    const label = element("span", { text: name });
    this._cells[0].className = "word name";
    this._cells[0].title = name;
    this._cells[0].append(this._swatch, label);
    this._state = element("span");
    this._cells[1].append(this._state);
    this._load = this._button("Load", () => (this._status === "evicted" ? "activate" : "evict"));
    this._pin = this._button("Pin", () => (this._pinned ? "unpin" : "pin"));
    this.root = element("tr", {}, ...this._cells);
  }

  _button(text, verb) {
    const made = element("button", { text, hidden: true, onclick: () =>
      this._refused(order(`models/${encodeURIComponent(this._orders)}/${verb()}`).catch(advise)) });
    this._cells[1].append(made);
    return made;
  }

  // `model`: as in `/admin/state`; `named`: what is counted under this name, an adapter's or its own.
  show(model, named, device, readings, admin) {
    const report = model.report, own = named === model.names[0]; // else an adapter of it
    this._orders = report.name;
    const page = readings.state.page_bytes;
    this._status = model.status;
    this._pinned = model.pinned;
    this._swatch.style.background = colourOf(report.name);
    const lacking = (report.whole_pages - report.weight_pages) * page;
    const fits = model.status === "evicted" && device && lacking <= device.free * device.page_bytes ? ", would fit" : "";
    const marks = `${model.pinned ? ", pinned" : ""}${fits}`;
    const aside = report.set_aside[named.name];
    const texts = [
      own ? `${aside ? "set aside" : model.status}${marks}` : `adapter of ${report.name}`,
      own ? String(report.running) : "", own ? String(report.waiting) : "",
      rate(readings.rates.get(named.name) ?? 0),
      own ? bytes(report.weight_pages * page) : "", own ? bytes(report.kv_pages * page) : "",
    ];
    write(this._state, texts.shift());
    texts.forEach((text, i) => write(this._cells[i + 2], text));
    this._cells[1].classList.toggle("failed", Boolean(aside) || model.status === "failed");
    this._cells[1].title = aside ?? "";
    this._latency(7, named.ttft, named.slo?.ttft);
    this._latency(9, named.tpot, named.slo?.tpot);
    this._load.hidden = this._pin.hidden = !admin || !own;
    write(this._load, model.status === "evicted" ? "Load" : "Evict");
    write(this._pin, model.pinned ? "Unpin" : "Pin");
  }

  // A model without a report: it is loaded, could not be, or is only listed.
  describe(status, reason) {
    this._status = "";
    this._load.hidden = this._pin.hidden = true;
    write(this._state, reason ? `${status}: ${reason}` : status);
    this._cells[1].classList.toggle("failed", status === "failed");
    for (const cell of this._cells.slice(2)) write(cell, "");
  }

  _latency(at, quantiles, level) {
    [quantiles?.p50, quantiles?.p99].forEach((value, i) => {
      const missed = level && value > level;
      write(this._cells[at + i], value === undefined ? "-" : `${seconds(value)}${missed ? " !" : ""}`);
      this._cells[at + i].classList.toggle("missed", Boolean(missed));
      this._cells[at + i].title = level ? `level ${seconds(level)}` : "no level";
    });
  }
}

// Add to a refusal for want of pages what an operator can do about it.
function advise(error) {
  if (error.message.startsWith("short of")) error.message += ": evict another model first";
  throw error;
}

export class ModelTable {
  constructor(refused) {
    this._refused = refused;
    this._rows = new Map();
    byId("models").tHead.append(element("tr", {}, ...HEADS.map(([text, kind]) =>
      element("th", { text, class: kind, scope: "col" }))));
    byId("search").addEventListener("input", () => this.show(this._readings, this._admin));
  }

  show(readings, admin) {
    this._readings = readings;
    this._admin = admin;
    if (!readings) return;
    const seen = new Set();
    const row = (name) => {
      seen.add(name);
      if (!this._rows.has(name)) this._rows.set(name, new ModelRow(name, this._refused));
      return this._rows.get(name);
    };
    const { state } = readings;
    if (state === null) {
      for (const model of readings.listed) row(model.id).describe(model.status.value, model.status.reason);
    } else {
      for (const model of state.models) {
        const device = state.devices.find((found) => model.devices.includes(found.device));
        for (const named of model.names) row(named.name).show(model, named, device, readings, admin);
      }
      for (const load of state.loading) {
        if (!seen.has(load.model)) row(load.model).describe(load.state, loadText(load));
      }
      for (const [name, why] of Object.entries(state.failed)) if (!seen.has(name)) row(name).describe("failed", why);
    }
    for (const name of this._rows.keys()) if (!seen.has(name)) this._rows.delete(name);
    const sought = byId("search").value.trim().toLowerCase();
    const names = [...seen].filter((name) => name.toLowerCase().includes(sought));
    arrange(byId("models").tBodies[0], names.map((name) => this._rows.get(name).root));
    write(byId("counts"), names.length === seen.size ? `${seen.size}` : `${names.length} of ${seen.size}`);
  }
}

const loadText = (load) => `${bytes(load.bytes)}${load.left == null ? "" : `, ${Math.round(load.left)} s left`}`;

// The models that can be asked, as options of the selects of the chat.
export function offerModels(readings) {
  const names = [...new Set(readings.names.map(({ name }) => name))];
  options(byId("model"), names);
  options(byId("beside"), ["", ...names], ["no other model", ...names]);
}
