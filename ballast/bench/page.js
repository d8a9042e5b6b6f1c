// Draws the page's pictures from the JSON beside it (`page_data.py` writes and describes it), at
// the width that the window has, and again whenever that changes.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const runs = data.runs;
const state = { device: "", view: "use" };
const SHOWN = 40; // models that have a picture of their own
const tip = document.getElementById("tip");
const BELOW = ["activations", "weights"];
const ABOVE = ["kv", "cached", "lent", "reclaiming"];
const FADED = { weights: 0, kv: 0.45, cached: 0.78 };
const MARGIN = { left: 114, right: 34 };

function element(name, attributes, parent, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

function html(name, className, parent, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

// `share` of white mixed into a colour.
function tint(colour, share) {
  const parts = [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
  return `rgb(${parts.map((p) => Math.round(p + (255 - p) * share)).join(" ")})`;
}

// Steps of 1, 2 or 5 times a power of ten, at most `most` of them.
function ticks(end, most) {
  const power = 10 ** Math.floor(Math.log10(end / most));
  const step = [1, 2, 5, 10].map((n) => n * power).find((s) => end / s <= most);
  const found = [];
  for (let n = 0; n * step <= end * 1.0001; n++) found.push(n * step);
  return found;
}

const amount = (mib) => (mib >= 1024 ? `${short(mib / 1024)} GiB` : `${short(mib)} MiB`);
const short = (number) => +(number >= 100 ? number.toFixed(0) : number.toPrecision(3));
const time = (s) => (s >= 1000 ? `${Math.round(s)} s` : `${+s.toPrecision(3)} s`);
const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
const last = (sorted, value) => {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle + 1; else high = middle;
  }
  return Math.max(0, low - 1);
};

const chosen = (run) =>
  Object.entries(run.devices).filter(([name]) => !state.device || name === state.device).map(([, d]) => d);
const isChosen = (mark) => !state.device || !mark.device || mark.device === state.device;

// Bands of one run, of the chosen devices together: {use, model, values}, in order of stacking.
function bands(run) {
  const found = new Map();
  for (const device of chosen(run)) {
    for (const [use, model, values] of device.bands) {
      const key = `${use}\n${model}`;
      const band = found.get(key) ?? { use, model, values: values.map(() => 0) };
      values.forEach((v, i) => { band.values[i] += v; });
      found.set(key, band);
    }
  }
  const place = (band) => (band.model < 0 ? data.models.length : band.model);
  return [...found.values()].sort((a, b) => place(a) - place(b));
}

function colour(band, nth) {
  if (state.view === "model" && band.use in FADED) {
    const own = band.model < 0 ? data.colours.shared : data.models[band.model].colour;
    return tint(own, FADED[band.use]);
  }
  return tint(data.colours.uses[band.use], nth % 2 ? 0.22 : 0);
}

// The area between two step functions over `at`, up to `end`.
function area(at, lower, upper, x, y, end) {
  const top = [], bottom = [];
  for (let i = 0; i < at.length; i++) {
    const from = x(at[i]).toFixed(1), to = x(i + 1 < at.length ? at[i + 1] : end).toFixed(1);
    top.push(`${from} ${y(upper[i]).toFixed(1)}L${to} ${y(upper[i]).toFixed(1)}`);
    bottom.push(`${to} ${y(lower[i]).toFixed(1)}L${from} ${y(lower[i]).toFixed(1)}`);
  }
  return `M${top.join("L")}L${bottom.reverse().join("L")}Z`;
}

function stack(svg, run, all, x, y, end) {
  const budget = sum(chosen(run).map((d) => d.budget));
  const outlined = data.models.length <= 20;
  for (const [uses, hangs] of [[BELOW, false], [ABOVE, true]]) {
    let base = run.at.map(() => 0);
    for (const use of uses) {
      all.filter((b) => b.use === use).forEach((band, nth) => {
        const next = base.map((v, i) => v + band.values[i]);
        const [low, high] = hangs ? [next, base].map((vs) => vs.map((v) => budget - v)) : [base, next];
        const shape = { d: area(run.at, low, high, x, y, end), fill: colour(band, nth), class: `band ${use}` };
        if (outlined && use === "weights") Object.assign(shape, { stroke: "white", "stroke-width": 0.5 });
        element("path", shape, svg);
        base = next;
      });
    }
  }
  const level = y(budget);
  element("path", { d: `M${x(0)} ${level}H${x(end)}`, stroke: "#1b2430", "stroke-width": 1.2 }, svg);
}

const SHAPES = {
  activations: (x, y) => `M${x - 4} ${y + 4}L${x} ${y - 4}L${x + 4} ${y + 4}Z`,
  evictions: (x, y) => `M${x - 4} ${y - 4}L${x} ${y + 4}L${x + 4} ${y - 4}Z`,
  preemptions: (x, y) => `M${x - 3.5} ${y - 3.5}l7 7m0-7l-7 7`,
  "refused requests": (x, y) => `M${x - 3.5} ${y}a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0Z`,
  "other decisions": (x, y) => `M${x} ${y - 4}v8`,
};
const STROKED = ["preemptions", "other decisions"];

function panel(run, holder, scales) {
  const title = html("h3", "", holder, run.name);
  html("span", "note", title, ` ${run.share} in service level`);
  if (!run.at.length) { html("p", "note", holder, "Its memory was not sampled."); return null; }
  const width = Math.max(280, holder.clientWidth);
  const left = MARGIN.left, right = width - MARGIN.right;
  const kinds = Object.keys(SHAPES);
  const memory = { top: 6, bottom: 176 }, rows = { top: 186, each: 14 };
  const queue = { top: rows.top + rows.each * kinds.length + 8 };
  queue.bottom = queue.top + 46;
  const height = queue.bottom + 34;
  const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img" }, holder);
  svg.setAttribute("aria-label", `Memory, decisions and queue under ${run.name}`);
  const x = (t) => left + (t / scales.seconds) * (right - left);
  const y = (v) => memory.bottom - (v / scales.memory) * (memory.bottom - memory.top);
  const q = (n) => queue.bottom - (n / scales.waiting) * (queue.bottom - queue.top);

  element("rect", { x: left, y: y(sum(chosen(run).map((d) => d.budget))), width: x(run.end) - left,
    height: memory.bottom - y(sum(chosen(run).map((d) => d.budget))), fill: data.colours.uses.free }, svg);
  const [unit, word] = scales.memory >= 10 * 1024 ? [1024, "GiB"] : [1, "MiB"];
  const all = bands(run);
  stack(svg, run, all, x, y, run.end);
  for (const [scale, box, labels, show] of [
    [y, memory, ticks(scales.memory / unit, 4).map((n) => n * unit), (n) => `${short(n / unit)} ${word}`], [q, queue, ticks(scales.waiting, 2).filter(Number.isInteger), String]]) {
    element("path", { d: `M${left} ${box.top}V${box.bottom}H${right}`, class: "axis" }, svg);
    for (const value of labels) {
      element("path", { d: `M${left - 4} ${scale(value)}h4`, class: "axis" }, svg);
      element("text", { x: left - 7, y: scale(value) + 4, "text-anchor": "end" }, svg, show(value));
    }
  }
  kinds.forEach((kind, row) => {
    const middle = rows.top + rows.each * (row + 0.5);
    const own = run.marks.filter((m) => m.kind === kind && !m.refused && isChosen(m));
    element("text", { x: left - 7, y: middle + 4, "text-anchor": "end" }, svg, kind);
    element("path", { d: `M${left} ${middle}H${right}`, class: "grid" }, svg);
    const d = own.map((m) => SHAPES[kind](+x(m.at).toFixed(1), middle)).join("");
    const paint = STROKED.includes(kind) ? { fill: "none", stroke: data.colours.marks[kind], "stroke-width": 1.6 }
      : { fill: data.colours.marks[kind] };
    element("path", { d, ...paint, opacity: 0.8, class: "marks", "data-kind": kind }, svg);
    element("text", { x: right + 6, y: middle + 4, class: "count" }, svg, own.length);
  });
  const waiting = run.at.map((_, i) => sum(chosen(run).map((device) => sum(Object.values(device.waiting).map((w) => w[i])))));
  element("path", { d: area(run.at, waiting.map(() => 0), waiting, x, q, run.end), fill: "#5b6675", class: "queue" }, svg);
  element("text", { x: 0, y: queue.top + 20 }, svg, "waiting");
  for (const t of ticks(scales.seconds, width < 700 ? 6 : 12)) {
    element("text", { x: x(t), y: queue.bottom + 15, "text-anchor": "middle" }, svg, +t.toPrecision(6));
  }
  element("text", { x: (left + right) / 2, y: queue.bottom + 30, "text-anchor": "middle" }, svg, "seconds");
  const cursor = element("path", { class: "cursor" }, svg);
  const drawn = { run, svg, x, all, waiting, cursor, top: memory.top, bottom: queue.bottom };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const t = ((event.clientX - box.left) * (width / box.width) - left) / (right - left) * scales.seconds;
    if (t < 0 || t > scales.seconds) return leave();
    hover(drawn, t, scales.seconds / (right - left) * 5, event);
  });
  svg.addEventListener("pointerleave", leave);
  return drawn;
}

let panels = [];

function leave() {
  tip.style.visibility = "hidden";
  for (const p of panels) p.cursor.style.visibility = "hidden";
}

// Values of one run at `t`, beside the pointer; a line in every panel. Decisions are those within
// `near` seconds.
function hover(over, t, near, event) {
  for (const p of panels) {
    p.cursor.setAttribute("d", `M${p.x(t)} ${p.top}V${p.bottom}`);
    p.cursor.style.visibility = "visible";
  }
  const run = over.run, i = last(run.at, t), budget = sum(chosen(run).map((d) => d.budget));
  tip.replaceChildren();
  html("b", "", tip, `${run.name} at ${time(t)}`);
  const table = html("table", "", tip);
  const row = (name, value, swatch) => {
    const cells = html("tr", "", table), first = html("td", "", cells);
    if (swatch) html("i", "", first).style.cssText = `display:inline-block;width:.8em;height:.8em;margin-right:.4em;background:${swatch}`;
    first.append(name);
    html("td", "", cells, value);
  };
  let free = budget;
  for (const use of [...BELOW, ...ABOVE]) {
    const held = sum(over.all.filter((b) => b.use === use).map((b) => b.values[i]));
    free -= held;
    if (held > 0) row(data.names[use], `${amount(held)} (${Math.round(100 * held / budget)} %)`, data.colours.uses[use]);
  }
  row(data.names.free, amount(Math.max(0, free)), data.colours.uses.free);
  row("waiting requests", String(over.waiting[i]));
  const models = data.models.map((m, n) => {
    const of = (use) => sum(over.all.filter((b) => b.model === n && b.use === use).map((b) => b.values[i]));
    const waiting = sum(chosen(run).map((d) => d.waiting[n]?.[i] ?? 0));
    return { name: m.name, colour: m.colour, weights: of("weights"), kv: of("kv") + of("cached"), waiting };
  }).filter((m) => m.weights + m.kv + m.waiting > 0);
  models.sort((a, b) => b.weights + b.kv - a.weights - a.kv);
  for (const m of models.slice(0, 8)) {
    const waits = m.waiting ? `, ${m.waiting} waiting` : "";
    const held = m.weights + m.kv > 0 ? `${amount(m.weights)}, KV ${amount(m.kv)}` : "not here";
    row(m.name, held + waits, m.colour);
  }
  if (models.length > 8) row(`and ${models.length - 8} more`, "");
  const alike = new Map();
  for (const m of run.marks) {
    if (Math.abs(m.at - t) > near || !isChosen(m)) continue;
    const key = sentence(m);
    alike.set(key, [...(alike.get(key) ?? []), m.at]);
  }
  for (const [words, times] of [...alike].slice(0, 5)) {
    html("p", "", tip, `${time(times[0])} ${words}${times.length > 1 ? ` (${times.length} times)` : ""}`);
  }
  if (alike.size > 5) html("p", "", tip, `and decisions of ${alike.size - 5} more kinds`);
  tip.style.visibility = "visible";
  const page = document.documentElement.clientWidth;
  const leftSide = event.clientX + 16 + tip.offsetWidth <= page;
  const at = leftSide ? event.clientX + 16 : Math.max(4, event.clientX - 16 - tip.offsetWidth);
  tip.style.left = `${Math.max(0, Math.min(at, page - tip.offsetWidth - 4)) + scrollX}px`;
  const lowest = Math.max(4, innerHeight - tip.offsetHeight - 4);
  tip.style.top = `${Math.min(event.clientY + 12, lowest) + scrollY}px`;
}

function sentence(mark) {
  const model = mark.model < 0 ? "" : ` ${data.models[mark.model].name}`;
  const where = mark.device && data.devices.length > 1 ? ` on ${mark.device}` : "";
  const why = mark.why ? `: ${mark.why}` : "";
  return `${mark.action}${model}${where}${why}${mark.refused ? ` (not done: ${mark.refused})` : ""}`;
}

function legend(holder) {
  holder.replaceChildren();
  const item = (name, fill) => {
    const made = html("span", "", holder);
    html("i", "", made).style.background = fill;
    made.append(name);
  };
  const there = new Set(runs.flatMap((run) => chosen(run).flatMap((d) => d.bands.map(([use]) => use))));
  const uses = [...BELOW, ...ABOVE].filter((use) => there.has(use));
  if (state.view === "model") {
    for (const m of data.models.slice(0, 24)) item(m.name, m.colour);
    if (data.models.length > 24) item(`and ${data.models.length - 24} more, in the same colours again`, "white");
    html("span", "note", holder, "full: weights · lighter: KV of open requests · lightest: cached prefixes");
    for (const use of uses.filter((u) => !(u in FADED))) item(data.names[use], data.colours.uses[use]);
  } else {
    for (const use of uses) item(data.names[use], data.colours.uses[use]);
  }
  item(data.names.free, data.colours.uses.free);
}

// A model's memory under each run, on one scale.
function smalls(holder) {
  holder.replaceChildren();
  const all = runs.map(bands);
  const seconds = Math.max(...runs.map((r) => r.end));
  for (const [n, model] of data.models.slice(0, SHOWN).entries()) {
    html("h3", "", holder, model.name);
    const row = html("div", "smalls", holder);
    row.style.setProperty("--runs", runs.length);
    const own = all.map((found) => ["weights", "kv", "cached"].map((use, nth) => {
      const one = found.find((b) => b.model === n && b.use === use);
      return one ? one.values : runs[all.indexOf(found)].at.map(() => 0);
    }));
    const most = Math.max(...own.map((uses) => Math.max(0, ...uses[0].map((_, i) => sum(uses.map((u) => u[i]))))), 1e-9);
    runs.forEach((run, r) => {
      const box = html("div", "small", row), width = Math.max(60, box.clientWidth);
      const svg = element("svg", { viewBox: `0 0 ${width} 44`, height: 44 }, box);
      const x = (t) => (t / seconds) * width, y = (v) => 43 - (v / most) * 41;
      element("rect", { x: 0, y: 0, width, height: 44, fill: data.colours.uses.free }, svg);
      let base = run.at.map(() => 0);
      ["weights", "kv", "cached"].forEach((use, nth) => {
        const next = base.map((v, i) => v + own[r][nth][i]);
        element("path", { d: area(run.at, base, next, x, y, run.end), fill: tint(model.colour, FADED[use]), class: "band" }, svg);
        base = next;
      });
      const peak = Math.max(0, ...base);
      html("span", "", box, `${run.name} ${model.shares[r]} · at most ${amount(peak)}`);
    });
  }
  const more = data.models.length - SHOWN;
  if (more > 0) html("p", "note", holder, `and ${more} more, in numbers below`);
}

// Shares of all requests that took at most so long; curves of runs with failures end below 1.
function curves(box, key, label) {
  const width = Math.max(260, box.clientWidth), height = 220;
  const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, height, width: "100%" }, box);
  const every = runs.flatMap((r) => r[key].map(([t]) => t));
  if (!every.length) return;
  const low = Math.floor(Math.log10(Math.min(...every))), high = Math.max(low + 1, Math.ceil(Math.log10(Math.max(...every))));
  const left = 46, right = width - 26, top = 8, bottom = height - 36;
  const x = (t) => left + (Math.log10(t) - low) / (high - low) * (right - left);
  const y = (share) => bottom - share * (bottom - top);
  for (let power = low; power <= high; power++) {
    element("path", { d: `M${x(10 ** power)} ${top}V${bottom}`, class: "grid" }, svg);
    const shown = power < 0 ? `${10 ** (power + 3) >= 1 ? 10 ** (power + 3) + " ms" : (10 ** (power + 6)) + " us"}` : `${10 ** power} s`;
    element("text", { x: x(10 ** power), y: bottom + 15, "text-anchor": "middle" }, svg, shown);
  }
  for (const share of [0, 0.5, 1]) {
    element("path", { d: `M${left} ${y(share)}H${right}`, class: "grid" }, svg);
    element("text", { x: left - 6, y: y(share) + 4, "text-anchor": "end" }, svg, `${100 * share} %`);
  }
  for (const level of data.levels[key]) {
    if (level < 10 ** low || level > 10 ** high) continue;
    element("path", { d: `M${x(level)} ${top}V${bottom}`, stroke: "#1b2430", "stroke-dasharray": "5 3" }, svg);
  }
  const dashes = ["", "7 3", "2 2", "8 2 2 2"];
  runs.forEach((run, r) => {
    if (!run[key].length) return;
    const line = run[key].map(([t, share], i) => `${i ? "H" : "M"}${x(t).toFixed(1)}${i ? "V" : " "}${y(share).toFixed(1)}`).join("");
    element("path", { d: line, fill: "none", stroke: data.colours.runs[r], "stroke-width": 2.2,
      "stroke-dasharray": dashes[r % 4], class: "curve" }, svg);
  });
  element("text", { x: (left + right) / 2, y: height - 4, "text-anchor": "middle" }, svg, label);
  const names = html("div", "legend", box);
  names.style.position = "static";
  runs.forEach((run, r) => {
    const item = html("span", "", names), swatch = element("svg", { width: 30, height: 10 }, item);
    swatch.style.cssText = "display:inline-block;width:30px;margin-right:.35em;vertical-align:0";
    element("path", { d: "M0 6H30", stroke: data.colours.runs[r], "stroke-width": 2.4, "stroke-dasharray": dashes[r % 4] }, swatch);
    item.append(run.name);
  });
}

function draw() {
  leave();
  const holder = document.getElementById("panels");
  holder.replaceChildren();
  legend(document.getElementById("legend"));
  const scales = {
    seconds: Math.max(...runs.map((r) => r.end)),
    memory: Math.max(...runs.map((r) => sum(chosen(r).map((d) => d.budget))), 1e-9),
    waiting: Math.max(1, ...runs.map((r) => Math.max(0, ...r.at.map((_, i) =>
      sum(chosen(r).map((d) => sum(Object.values(d.waiting).map((w) => w[i])))))))),
  };
  panels = runs.map((run) => panel(run, html("div", "panel", holder), scales)).filter((p) => p !== null);
  smalls(document.getElementById("models"));
  const latencies = document.getElementById("latencies");
  latencies.replaceChildren();
  // Both first: each is as wide as the other lets it be.
  const boxes = [html("div", "", latencies), html("div", "", latencies)];
  curves(boxes[0], "ttft", "time to first token");
  curves(boxes[1], "tpot", "time per output token");
}

for (const [id, key] of [["device", "device"], ["view", "view"]]) {
  const select = document.getElementById(id);
  select?.addEventListener("change", () => { state[key] = select.value; draw(); });
}
let drawnWidth = 0;
function redraw() {
  const width = document.documentElement.clientWidth;
  if (width !== drawnWidth) { drawnWidth = width; draw(); }
}
addEventListener("resize", redraw);
redraw();
