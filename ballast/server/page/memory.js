// Memory of each device over the last minutes, hour or day, the same in numbers, and what would fit.

import { ApiError, order, readHistory } from "./api.js";
import { arrange, byId, element, write } from "./dom.js";
import { bytes, listed } from "./format.js";
import { colourOf, drawStrip, sampleOfDevice } from "./strip.js";

const MINUTES = 240; // seconds that are shown of what this page has seen itself
const MOST = 600; // samples kept of a device
const NAMED = 6; // models that are named as fitting

class DevicePanel {
  constructor(name, refused) {
    this.samples = []; // of the last minutes
    this.past = []; // of a longer time
    this._canvas = element("canvas", { role: "img", "aria-label": `memory of ${name}` });
    this._title = element("span", { text: name });
    this._numbers = element("p", { class: "small" });
    this._fits = element("p", { class: "small" });
    this._order = element("button", { text: "Drain", onclick: () =>
      refused(order(`devices/${encodeURIComponent(name)}/${this._cordoned ? "uncordon" : "drain"}`)) });
    this.root = element("div", { class: "device" }, element("h3", {}, this._title, " ", this._order), this._canvas, this._numbers, this._fits);
  }

  add(device, state, admin) {
    const { time } = state, last = this.samples.at(-1);
    if (last && time < last.time) this.samples = []; // the clock was set back
    this.samples.push(sampleOfDevice(device, time));
    if (this.samples.length > MOST) this.samples.splice(0, this.samples.length - MOST);
    this._cordoned = device.cordoned;
    const note = [device.cordoned ? "drained" : "", device.reason ?? ""].filter(Boolean).join(", ");
    write(this._title, `${device.device}${device.host ? ` on ${device.host}` : ""}, ${bytes(device.total * device.page_bytes)}${note ? ` (${note})` : ""}`);
    write(this._order, device.cordoned ? "Take requests again" : "Drain");
    this._order.hidden = !admin;
    write(this._numbers, numbers(device));
    write(this._fits, fitting(device, state));
  }

  draw(seconds, every) {
    const samples = every ? [...this.past, ...this.samples.slice(-1)] : this.samples;
    const end = (samples.at(-1)?.time ?? 0) + 1;
    drawStrip(this._canvas, samples, end - seconds, end, every ? 1.5 * every : 5);
  }
}

function numbers(device) {
  const held = {};
  for (const [owner, pages] of Object.entries(device.owners)) {
    const use = owner.slice(0, owner.indexOf(":"));
    held[use] = (held[use] ?? 0) + pages;
  }
  const cached = Math.min(held.kv ?? 0, device.cached_pages);
  const parts = [
    ["weights", (held.weights ?? 0) + (held.shared ?? 0) + (held.slots ?? 0), true],
    ["KV", (held.kv ?? 0) - cached, true],
    ["cached prefixes", cached, false],
    ["activations", held.arena ?? 0, false],
    ["lent", held.lent ?? 0, false],
    ["reclaiming", device.reclaiming, false],
    ["free", device.free, true],
  ];
  return parts.filter(([, pages, always]) => pages || always)
    .map(([name, pages]) => `${name} ${bytes(pages * device.page_bytes)}`).join(" · ");
}

// Which evicted models of a device its free pages would hold now, each by itself, and which more if cached prefixes went.
function fitting(device, state) {
  const free = device.free * device.page_bytes, cached = device.cached_pages * device.page_bytes;
  const away = state.models.filter((m) => m.status === "evicted" && m.devices.includes(device.device));
  if (!away.length) return "";
  const lacks = (m) => (m.report.whole_pages - m.report.weight_pages) * state.page_bytes;
  const names = (models) => listed(models.map((m) => m.report.name), NAMED);
  const now = away.filter((m) => lacks(m) <= free);
  const then = away.filter((m) => lacks(m) > free && lacks(m) <= free + cached);
  return `of ${away.length} evicted would fit now: ${names(now) || "none"}${then.length ? `; without cached prefixes also ${names(then)}` : ""}`;
}

export class MemoryPanels {
  constructor(refused) {
    this._refused = refused;
    this._panels = new Map();
    this._every = this._due = 0;
    addEventListener("resize", () => this._draw());
    byId("span").addEventListener("change", () => { this._due = 0; this._look(); });
  }

  get _seconds() { return Number(byId("span").value); }

  show(readings, admin) {
    const devices = readings.state?.devices ?? [];
    for (const model of readings.state?.models ?? []) colourOf(model.report.name);
    const there = new Set(devices.map((device) => device.device));
    for (const name of this._panels.keys()) if (!there.has(name)) this._panels.delete(name);
    for (const { device: name } of devices) {
      if (!this._panels.has(name)) this._panels.set(name, new DevicePanel(name, this._refused));
    }
    byId("span-label").hidden = !devices.length;
    arrange(byId("devices"), devices.map((device) => this._panels.get(device.device).root));
    if (readings.trouble || !devices.length) return;
    for (const device of devices) this._panels.get(device.device).add(device, readings.state, admin);
    this._draw();
    this._look();
  }

  _draw() { for (const panel of this._panels.values()) panel.draw(this._seconds, this._every); }

  // Read what was before this page, when it is due: once of the last minutes, else as often as there is more.
  async _look() {
    if (performance.now() < this._due || !this._panels.size) return;
    this._due = Infinity;
    const seconds = this._seconds;
    try {
      const { every, samples } = await readHistory(seconds);
      const recent = seconds <= MINUTES;
      for (const [name, panel] of this._panels) {
        const first = panel.samples[0]?.time ?? Infinity;
        panel.past = samples.flatMap(({ time, devices }) =>
          devices.filter((device) => device.device === name).map((device) => sampleOfDevice(device, time)));
        if (recent) panel.samples = [...panel.past.filter((sample) => sample.time < first), ...panel.samples];
      }
      this._every = recent ? 0 : every;
      this._due = recent ? Infinity : performance.now() + every * 1000;
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this._due = performance.now() + 10e3;
    }
    this._draw();
  }
}
