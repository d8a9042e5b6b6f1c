// Requests to models: those that are open, then those that ended last. Their texts are shown where
// the operator has them kept, to the admin key.

import { arrange, byId, element, write } from "./dom.js";
import { seconds, span } from "./format.js";

const MOST = 40;
const HEADS = [["request", "word"], ["model", "word"], ["state", "word"], ["age", ""], ["queued", ""], ["activating", ""],
  ["computing", ""], ["TTFT", ""], ["TPOT", ""], ["prompt", ""], ["cached", "word"], ["output", ""]];

class RequestRow {
  constructor() {
    this._cells = HEADS.map(([, kind], i) => element("td", { class: `${kind}${i < 2 ? " name" : ""}` }));
    this._label = element("span");
    this._prompt = element("p", { class: "text" });
    this._output = element("p", { class: "text" });
    this._texts = element("details", { hidden: true }, element("summary", { text: "texts" }), this._prompt, this._output);
    this._cells[0].append(this._label, this._texts);
    this.root = element("tr", {}, ...this._cells);
  }

  show(request, age, status) {
    const time = (s) => (s == null ? "" : seconds(s)), { queued, activating } = request;
    const bad = request.error !== null || request.gone;
    const computing = queued == null ? null : Math.max(0, (request.seconds ?? age) - queued);
    const texts = [request.model, stateOf(request, status), span(age), time(queued == null ? null : queued - activating), time(activating),
      time(computing), time(request.ttft), time(request.tpot), String(request.prompt_tokens), cachedOf(request), String(request.output_tokens)];
    write(this._label, request.key ? `${request.request_id} (${request.key})` : request.request_id);
    this._cells[0].title = request.request_id;
    this._cells[1].title = request.model;
    texts.forEach((text, i) => write(this._cells[i + 1], text));
    this._cells[2].classList.toggle("failed", bad);
    this.root.className = request.state;
    this._texts.hidden = !request.texts;
    write(this._prompt, request.texts ? `… ${request.texts.prompt}` : "");
    write(this._output, request.texts?.output ?? "");
  }
}

export class RequestTable {
  constructor() {
    this._rows = new Map();
    byId("requests").tHead.append(element("tr", {}, ...HEADS.map(([text, kind]) => element("th", { text, class: kind, scope: "col" }))));
  }

  show(readings) {
    const { open = [], ended = [], endedAt = 0 } = readings.requests ?? {}, rows = new Map(), passed = (performance.now() - endedAt) / 1000;
    for (const request of [...open, ...ended].slice(0, MOST)) {
      let key = request.request_id; // which clients choose, so that several may have the same one
      while (rows.has(key)) key += "+";
      const row = this._rows.get(key) ?? new RequestRow();
      row.show(request, request.state === "ended" ? request.age + passed : request.age, readings.statusOf(request.model));
      rows.set(key, row);
    }
    this._rows = rows;
    arrange(byId("requests").tBodies[0], [...rows.values()].map((row) => row.root));
  }
}

function stateOf(request, status) {
  if (request.state === "waiting") return { loading: "activating", evicted: "waiting for its weights" }[status] ?? "waiting";
  if (request.state !== "ended") return request.state;
  if (request.gone) return "client left";
  return request.error ?? (request.finish.join(", ") || `status ${request.status}`);
}

function cachedOf(request) {
  const tiers = Object.entries(request.cached_tokens_by_tier ?? {}).filter(([, n]) => n > 0);
  if (!tiers.length) return String(request.cached_tokens);
  return `${request.cached_tokens}: ${tiers.map(([tier, n]) => `${tier} ${n}`).join(", ")}`;
}
