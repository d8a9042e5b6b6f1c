// Plays what memory was used for, and what was decided, over time: of a simulation, of this server's
// story, or of its last hours.

import { arrange, byId, element, options, write } from "./dom.js";
import { decisionRow } from "./decisions.js";
import { bytes, seconds } from "./format.js";
import { colourOf, drawStrip, sampleOf, sampleOfDevice } from "./strip.js";

const FILM_SECONDS = 30; // in which a film is played
const STEPS = 1000; // of the slider
const SHOWN = 12; // decisions
const NAMED = 10; // models in the legend
const MIB = 1 << 20;

// A film: {title, begin, end, clock, devices: [{name, unit, samples}], decisions: [{time, device, action, model, why, refused}]}; `clock`:
// writes a time. This one is of a run of `bench.page_data`.
export function filmOfRun(played, run, title, began = null) {
  const times = run.at, name = (model) => (model < 0 ? "" : played.models[model].name);
  const devices = Object.entries(run.devices).map(([device, { budget, bands }]) => ({
    name: device,
    unit: MIB,
    samples: times.map((time, i) => sampleOf(time, budget, bands.map(([use, model, values]) => [use, name(model), values[i]]))),
  }));
  const decisions = run.marks.map(({ at, device, action, model, why, refused }) => ({ time: at, device, action, model: name(model), why, refused }));
  const clock = (time) => (began === null ? seconds(time) : moment(began + time));
  return { title, begin: 0, end: Math.max(run.end, times.at(-1) ?? 0), clock, devices, decisions };
}

// A film of `/admin/history` and the decisions of `/admin/story`.
export function filmOfHistory({ samples }, decisions, title) {
  const named = new Map();
  for (const { time, devices } of samples) {
    for (const device of devices) {
      if (!named.has(device.device)) named.set(device.device, { name: device.device, unit: device.page_bytes, samples: [] });
      named.get(device.device).samples.push(sampleOfDevice(device, time));
    }
  }
  const begin = samples[0]?.time ?? 0, end = samples.at(-1)?.time ?? 0;
  const within = decisions.filter(({ time }) => time >= begin);
  return { title, begin, end, clock: moment, devices: [...named.values()], decisions: within };
}

const moment = (time) => new Date(time * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });

export class Player {
  constructor() {
    this._films = [];
    this._film = null;
    this._timer = 0;
    byId("film").addEventListener("change", () => this._choose(this._films[byId("film").selectedIndex]));
    byId("play").addEventListener("click", () => (this._timer ? this._pause() : this._play()));
    byId("moment").addEventListener("input", () => { this._pause(); this._show(); });
    addEventListener("resize", () => this._show());
  }

  // Offer films, and show the first.
  offer(films) {
    this._pause();
    this._films = films;
    options(byId("film"), films.map((_, i) => String(i)), films.map(({ title }) => title));
    byId("film").selectedIndex = 0;
    byId("player").hidden = !films.length;
    if (films.length) this._choose(films[0]);
  }

  _choose(film) {
    this._film = film;
    this._strips = film.devices.map(({ name }) => {
      const canvas = element("canvas", { role: "img", "aria-label": `memory of ${name}` }), numbers = element("p", { class: "small" });
      return { canvas, numbers, root: element("div", { class: "device" }, element("h3", { text: name }), canvas, numbers) };
    });
    arrange(byId("film-devices"), this._strips.map(({ root }) => root));
    byId("film-legend").replaceChildren(...legend(film));
    byId("moment").value = STEPS;
    this._show();
  }

  get _time() { return this._film.begin + (byId("moment").value / STEPS) * (this._film.end - this._film.begin); }

  _play() {
    if (Number(byId("moment").value) >= STEPS) byId("moment").value = 0;
    const from = Number(byId("moment").value), began = performance.now();
    write(byId("play"), "Pause");
    this._timer = setInterval(() => {
      const at = from + ((performance.now() - began) / (FILM_SECONDS * 1000)) * STEPS;
      byId("moment").value = Math.min(STEPS, at);
      this._show();
      if (at >= STEPS) this._pause();
    }, 100);
  }

  _pause() {
    clearInterval(this._timer);
    this._timer = 0;
    write(byId("play"), "Play");
  }

  _show() {
    const film = this._film;
    if (!film) return;
    const time = this._time, longest = (film.end - film.begin) / 20;
    write(byId("moment-text"), film.clock(time));
    byId("moment").setAttribute("aria-valuetext", film.clock(time));
    film.devices.forEach(({ samples, unit }, i) => {
      drawStrip(this._strips[i].canvas, samples, film.begin, film.end, longest, time);
      write(this._strips[i].numbers, numbersAt(samples, time, unit));
    });
    const past = film.decisions.filter((decision) => decision.time <= time);
    write(byId("film-count"), `${past.length} of ${film.decisions.length} decisions`);
    arrange(byId("film-decisions").tBodies[0], past.slice(-SHOWN).reverse().map((decision) =>
      decisionRow(decision, film.clock(decision.time), film.devices.length > 1)));
  }
}

// The colours of the models that have most of a film's memory.
function legend(film) {
  const held = new Map();
  for (const { samples } of film.devices) {
    for (const { floor, hanging } of samples) {
      for (const { name, amount } of [...floor, ...hanging]) if (name) held.set(name, (held.get(name) ?? 0) + amount);
    }
  }
  const names = [...held].sort((a, b) => b[1] - a[1]).slice(0, NAMED).map(([name]) => name);
  return names.flatMap((name) => {
    const swatch = element("span", { class: "swatch" });
    swatch.style.background = colourOf(name);
    return [swatch, `${name}  `];
  });
}

// What the sample at a time shows, by use.
function numbersAt(samples, time, unit) {
  const sample = samples.findLast((found) => found.time <= time);
  if (!sample) return "";
  const uses = new Map();
  for (const { use, amount } of [...sample.floor, ...sample.hanging]) uses.set(use, (uses.get(use) ?? 0) + amount);
  const held = [...uses.values()].reduce((a, b) => a + b, 0);
  const parts = [...uses, ["free", sample.total - held]];
  return parts.map(([use, amount]) => `${use === "arena" ? "activations" : use === "kv" ? "KV" : use} ${bytes(amount * unit)}`).join(" · ");
}
