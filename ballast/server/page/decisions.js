// Decisions of the fleet's policies and operators, newest first, with their reasons and prices.

import { arrange, byId, element } from "./dom.js";
import { span } from "./format.js";

const MOST = 30;

// A row; `when`: its time in words.
export function decisionRow(decision, when, several) {
  const refused = decision.refused ? [element("span", { class: "failed", text: ` refused: ${decision.refused}` })] : [];
  const where = several && decision.device ? ` on ${decision.device}` : "";
  const what = `${decision.action ?? ""} ${decision.model ?? decision.to ?? ""}${where}`;
  const pages = typeof decision.pages === "number" ? ` (${decision.pages} pages)` : "";
  const [reason, ...priced] = (decision.why ?? "").split("; ");
  const prices = priced.map((part) => element("div", { class: "small", text: part }));
  return element("tr", {},
    element("td", { class: "word", text: when }),
    element("td", { class: "word name", text: what, title: what }),
    element("td", { class: "word why" }, `${reason}${pages}`, ...prices, ...refused));
}

export function showDecisions(readings) {
  const state = readings.state;
  const shown = (state?.decisions ?? []).slice(-MOST).reverse();
  arrange(byId("decisions").tBodies[0], shown.map((decision) =>
    decisionRow(decision, `${span(state.time - decision.time)} ago`, state.devices.length > 1)));
}
