// Memory of each device over the last minutes: weights stand on the floor, KV hangs from the budget,
// and what is between them is free. Below, the same in numbers.

import { order } from "./api.js";
import { arrange, byId, element, write } from "./dom.js";
import { bytes } from "./format.js";

const SHOWN_SECONDS = 240;
const MOST = 600; // readings kept of a device
const COLOURS = ["#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6", "#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd"];
const COMMON = { arena: "#98a2b1", shared: "#2f74b5", lent: "#8a4fa3", reclaiming: "#5b6675" };

const places = new Map(); // each model's number, in the order in which they were first seen
export function colourOf(name) {
  if (!places.has(name)) places.set(name, places.size);
  return COLOURS[places.get(name) % COLOURS.length];
}

// Pages of one device by use, as parts from the floor up and from the budget down.
function sampleOf(device, time) {
  const floor = [], hanging = [];
  for (const [owner, pages] of Object.entries(device.owners)) {
    const cut = owner.indexOf(":"), use = owner.slice(0, cut), name = owner.slice(cut + 1);
    if (use === "kv") hanging.push({ colour: colourOf(name), alpha: 0.55, order: places.get(name), pages });
    else if (use in COMMON) floor.push({ colour: COMMON[use], alpha: 1, order: -1, pages });
    else floor.push({ colour: colourOf(name), alpha: 1, order: places.get(name), pages });
  }
  if (device.reclaiming) floor.push({ colour: COMMON.reclaiming, alpha: 1, order: Infinity, pages: device.reclaiming });
  for (const parts of [floor, hanging]) parts.sort((a, b) => a.order - b.order);
  return { time, total: device.total, floor, hanging };
}

class DevicePanel {
  constructor(name, refused) {
    this._samples = [];
    this._canvas = element("canvas", { role: "img", "aria-label": `memory of ${name}` });
    this._title = element("span", { text: name });
    this._numbers = element("p", { class: "small" });
    this._order = element("button", { text: "Drain", onclick: () => this._cordon(name, refused) });
    this.root = element("div", { class: "device" }, element("h3", {}, this._title, " ", this._order), this._canvas, this._numbers);
  }

  async _cordon(name, refused) {
    refused(order(`devices/${encodeURIComponent(name)}/${this._cordoned ? "uncordon" : "drain"}`));
  }

  add(device, time, admin) {
    const last = this._samples.at(-1);
    if (last && time < last.time) this._samples = []; // the clock was set back
    this._samples.push(sampleOf(device, time));
    if (this._samples.length > MOST) this._samples.splice(0, this._samples.length - MOST);
    this._cordoned = device.cordoned;
    const state = [device.cordoned ? "drained" : "", device.reason ?? ""].filter(Boolean).join(", ");
    write(this._title, `${device.device}, ${bytes(device.total * device.page_bytes)}${state ? ` (${state})` : ""}`);
    write(this._order, device.cordoned ? "Take requests again" : "Drain");
    this._order.hidden = !admin;
    write(this._numbers, numbers(device));
    this.draw();
  }

  draw() {
    const ratio = window.devicePixelRatio || 1, width = this._canvas.clientWidth, height = this._canvas.clientHeight;
    if (!width || !this._samples.length) return;
    if (this._canvas.width !== Math.round(width * ratio)) this._canvas.width = Math.round(width * ratio);
    if (this._canvas.height !== Math.round(height * ratio)) this._canvas.height = Math.round(height * ratio);
    const pen = this._canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    const end = this._samples.at(-1).time, x = (time) => width - ((end - time) / SHOWN_SECONDS) * width;
    const step = width / SHOWN_SECONDS;
    this._samples.forEach((sample, i) => {
      const next = this._samples[i + 1]?.time ?? sample.time + 1;
      const left = Math.round(x(sample.time) - step), right = Math.round(Math.min(x(next) - step, left + 5 * step));
      if (right < 0 || !sample.total) return;
      const scale = height / sample.total;
      const strip = (part, top) => {
        pen.globalAlpha = part.alpha;
        pen.fillStyle = part.colour;
        pen.fillRect(left, top, right - left, part.pages * scale);
      };
      let bottom = height, top = 0;
      for (const part of sample.floor) strip(part, (bottom -= part.pages * scale));
      for (const part of sample.hanging) { strip(part, top); top += part.pages * scale; }
    });
    pen.globalAlpha = 1;
  }
}

function numbers(device) {
  const held = {};
  for (const [owner, pages] of Object.entries(device.owners)) {
    const use = owner.slice(0, owner.indexOf(":"));
    held[use] = (held[use] ?? 0) + pages;
  }
  const cached = Math.min(held.kv ?? 0, device.models.reduce((n, m) => n + m.cached_pages, 0));
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

export class MemoryPanels {
  constructor(refused) {
    this._refused = refused;
    this._panels = new Map();
    addEventListener("resize", () => { for (const panel of this._panels.values()) panel.draw(); });
  }

  show(readings, admin) {
    const devices = readings.state?.devices ?? [];
    for (const model of readings.state?.models ?? []) colourOf(model.report.name);
    const there = new Set(devices.map((device) => device.device));
    for (const name of this._panels.keys()) if (!there.has(name)) this._panels.delete(name);
    for (const { device: name } of devices) {
      if (!this._panels.has(name)) this._panels.set(name, new DevicePanel(name, this._refused));
    }
    arrange(byId("devices"), devices.map((device) => this._panels.get(device.device).root));
    if (readings.trouble) return;
    for (const device of devices) this._panels.get(device.device).add(device, readings.state.time, admin);
  }
}
