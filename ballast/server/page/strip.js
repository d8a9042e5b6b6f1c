// Memory over time as a strip: weights stand on the floor, KV hangs from the budget, and what is
// between them is free.

const COLOURS = ["#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6", "#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd"];
const COMMON = { arena: "#98a2b1", activations: "#98a2b1", shared: "#2f74b5", lent: "#8a4fa3", reclaiming: "#5b6675" };
const HANGING = { kv: 0.55, cached: 0.3 }; // opacity

const places = new Map(); // each model's number, in the order in which they were first seen
export function colourOf(name) {
  if (name === "") return COMMON.arena; // small owners together
  if (!places.has(name)) places.set(name, places.size);
  return COLOURS[places.get(name) % COLOURS.length];
}

// What of a device's memory is whose, at one time: `owned` are [use, model, amount], in the unit of `total`.
export function sampleOf(time, total, owned) {
  const floor = [], hanging = [];
  for (const [use, name, amount] of owned) {
    if (!amount) continue;
    const common = COMMON[use], colour = common ?? colourOf(name);
    const order = common ? (use === "reclaiming" ? Infinity : -1) : (places.get(name) ?? 1e9);
    const part = { use, name: common ? "" : name, colour, alpha: HANGING[use] ?? 1, order, amount };
    (use in HANGING ? hanging : floor).push(part);
  }
  for (const parts of [floor, hanging]) parts.sort((a, b) => a.order - b.order);
  return { time, total, floor, hanging };
}

// Sample of a device as `/admin/state` and `/admin/history` have it, in pages.
export function sampleOfDevice(device, time) {
  const owned = Object.entries(device.owners).map(([owner, pages]) => {
    const cut = owner.indexOf(":");
    return [owner.slice(0, cut), owner.slice(cut + 1), pages];
  });
  return sampleOf(time, device.total, [...owned, ["reclaiming", "", device.reclaiming]]);
}

// Draw samples from the time `begin` to `end`; each lasts until the next one, at most `longest` seconds. `cursor`: a time to mark.
export function drawStrip(canvas, samples, begin, end, longest, cursor = null) {
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  if (!width || end <= begin) return;
  for (const [side, size] of [["width", width], ["height", height]]) {
    if (canvas[side] !== Math.round(size * ratio)) canvas[side] = Math.round(size * ratio);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  const x = (time) => Math.round(((time - begin) / (end - begin)) * width);
  samples.forEach((sample, i) => {
    const until = Math.min(samples[i + 1]?.time ?? end, sample.time + longest, end);
    if (until < begin || sample.time > end || !sample.total) return;
    const left = x(Math.max(begin, sample.time)), right = Math.max(x(until), left + 1), scale = height / sample.total;
    const strip = (part, top) => {
      pen.globalAlpha = part.alpha;
      pen.fillStyle = part.colour;
      pen.fillRect(left, top, right - left, part.amount * scale);
    };
    let bottom = height, top = 0;
    for (const part of sample.floor) strip(part, (bottom -= part.amount * scale));
    for (const part of sample.hanging) { strip(part, top); top += part.amount * scale; }
  });
  pen.globalAlpha = 1;
  if (cursor === null) return;
  pen.fillStyle = getComputedStyle(canvas).color;
  pen.fillRect(Math.min(x(cursor), width - 2), 0, 2, height);
}
