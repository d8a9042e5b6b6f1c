// Requests to models: those that are open, then those that ended last. Their texts are not shown.

import { arrange, byId, element } from "./dom.js";
import { seconds, span } from "./format.js";

const MOST = 40;
const HEADS = [["request", "word"], ["model", "word"], ["state", "word"], ["age", ""], ["queued", ""], ["TTFT", ""],
  ["TPOT", ""], ["prompt", ""], ["cached", "word"], ["output", ""]];

export function showRequests(readings) {
  const { open = [], ended = [] } = readings.requests ?? {};
  const table = byId("requests");
  if (!table.tHead.rows.length) {
    table.tHead.append(element("tr", {}, ...HEADS.map(([text, kind]) => element("th", { text, class: kind, scope: "col" }))));
  }
  arrange(table.tBodies[0], [...open, ...ended].slice(0, MOST).map(row));
}

function row(request) {
  const time = (s) => (s == null ? "" : seconds(s));
  const bad = request.error !== null || request.gone;
  const texts = [
    request.key ? `${request.request_id} (${request.key})` : request.request_id, request.model, stateOf(request), span(request.age),
    time(request.queued), time(request.ttft), time(request.tpot), String(request.prompt_tokens), cachedOf(request),
    String(request.output_tokens),
  ];
  return element("tr", { class: request.state }, ...HEADS.map(([, kind], i) =>
    element("td", { class: `${kind}${i < 2 ? " name" : ""}${i === 2 && bad ? " failed" : ""}`, text: texts[i], title: texts[i] })));
}

function stateOf(request) {
  if (request.state !== "ended") return request.state;
  if (request.gone) return "client left";
  return request.error ?? (request.finish.join(", ") || `status ${request.status}`);
}

function cachedOf(request) {
  const tiers = Object.entries(request.cached_tokens_by_tier ?? {}).filter(([, n]) => n > 0);
  if (!tiers.length) return String(request.cached_tokens);
  return `${request.cached_tokens}: ${tiers.map(([tier, n]) => `${tier} ${n}`).join(", ")}`;
}
