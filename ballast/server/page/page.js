// The page at `/`: chat with the fleet's models, and see how they share memory. It needs no build
// step and loads nothing from elsewhere: it is one more client of the server's API.

import { ApiError, hasAdminKey, useKeys } from "./api.js";
import { Conversation } from "./chat.js";
import { showDecisions } from "./decisions.js";
import { byId, write } from "./dom.js";
import { span } from "./format.js";
import { MemoryPanels } from "./memory.js";
import { ModelTable, offerModels } from "./models.js";
import { Player } from "./player.js";
import { Readings } from "./readings.js";
import { RequestTable } from "./requests.js";
import { Simulations } from "./simulations.js";

const SIGHTLESS = "Memory, requests and decisions are shown to keys that may read /admin/state: the admin key, where there is one.";

const readings = new Readings();

// Await an operator's order, and show why it was not done.
async function refused(ordered) {
  write(byId("refused"), "");
  try {
    await ordered;
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    write(byId("refused"), error.message);
  }
}

function statusText() {
  if (readings.trouble) return readings.trouble;
  if (readings.state === null) return `${readings.listed.length} models`;
  const { status, preset, device, uptime, version, open, reason } = readings.state;
  const state = status === "ok" ? "serving" : status;
  return [`${state}${reason ? `: ${reason}` : ""}`, `preset ${preset}`, device, `${open} open request${open === 1 ? "" : "s"}`, `up ${span(uptime)}`, `v${version}`].join(" · ");
}

const memory = new MemoryPanels(refused), models = new ModelTable(refused), requests = new RequestTable();
const simulations = new Simulations(new Player());
readings.listen(() => {
  write(byId("status"), statusText());
  byId("status").classList.toggle("bad", Boolean(readings.trouble));
  if (readings.wantsKey) byId("keys").open = true;
  write(byId("sight"), readings.state === null && !readings.trouble ? SIGHTLESS : "");
  offerModels(readings);
  memory.show(readings, hasAdminKey());
  models.show(readings, hasAdminKey());
  requests.show(readings);
  showDecisions(readings);
  simulations.show(readings);
});
new Conversation(readings);

function showView(tab) {
  for (const other of document.querySelectorAll("[role=tab]")) {
    const shown = other === tab;
    other.setAttribute("aria-selected", shown);
    other.tabIndex = shown ? 0 : -1;
    byId(other.getAttribute("aria-controls")).hidden = !shown;
  }
  dispatchEvent(new Event("resize")); // what was hidden has not been drawn
}

byId("keys-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKeys(byId("api-key").value.trim(), byId("admin-key").value.trim());
  byId("keys").open = false;
  readings.withNewKey();
});
for (const tab of document.querySelectorAll("[role=tab]")) tab.addEventListener("click", () => showView(tab));
document.querySelector("[role=tablist]").addEventListener("keydown", ({ key }) => {
  const tabs = [...document.querySelectorAll("[role=tab]")], step = { ArrowLeft: -1, ArrowRight: 1 }[key];
  if (!step) return;
  const next = tabs[(tabs.indexOf(document.activeElement) + step + tabs.length) % tabs.length];
  next.focus();
  showView(next);
});
readings.follow();
