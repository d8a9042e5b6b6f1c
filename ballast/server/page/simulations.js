// Simulates this fleet under several presets, plans devices for it, and plays what happened.

import { ApiError, hasAdminKey, readHistory, readStory, simulate } from "./api.js";
import { arrange, byId, element, write } from "./dom.js";
import { percent, rate, seconds } from "./format.js";
import { filmOfHistory, filmOfRun } from "./player.js";

const SIMULATED = [["preset", "word"], ["in level", "word"], ["worst model", ""], ["TTFT p50", ""], ["p99", ""], ["TPOT p50", ""], ["p99", ""],
  ["tokens/s", ""], ["activations", ""], ["evictions", ""], ["preemptions", ""]];
const PLANNED = [["preset", "word"], ["devices", ""], ["in level", "word"], ["with one fewer", ""], ["on one alone", ""]];
const DECISIONS = 10000; // that are asked for, to be played

export class Simulations {
  constructor(player) {
    this._player = player;
    this._stopping = null;
    byId("simulate-form").addEventListener("submit", (event) => { event.preventDefault(); this._ask(); });
    byId("simulate-stop").addEventListener("click", () => this._stopping?.abort());
    byId("what").addEventListener("change", () => this._fields());
    for (const button of document.querySelectorAll("[data-history]")) {
      button.addEventListener("click", () => this._run(() => this._history(Number(button.dataset.history), button.textContent)));
    }
    byId("story").addEventListener("click", () => this._run((signal) => this._story(signal)));
    this._fields();
  }

  // Show what may be done with the key, and what is simulated here.
  show(readings) {
    const open = hasAdminKey() && readings.state !== null;
    byId("simulate-go").disabled = byId("story").disabled = !open || this._stopping !== null;
    write(byId("simulate-note"), open ? "" : "Simulating this fleet takes the admin key.");
    if (readings.state !== null) byId("presets").placeholder = `${readings.state.preset} beside lru and recompute`;
  }

  _fields() {
    const plans = byId("what").value === "plan";
    byId("target-label").hidden = !plans;
    byId("target").disabled = !plans;
    if (plans && byId("where").value === "here") byId("where").value = "H100-80G";
    if (!plans && byId("where").value === "H100-80G") byId("where").value = "here";
  }

  async _run(work) {
    if (this._stopping) return;
    const stopping = (this._stopping = new AbortController());
    byId("simulate-go").disabled = byId("story").disabled = true;
    byId("simulate-stop").disabled = false;
    write(byId("simulated-error"), "");
    write(byId("simulated-progress"), "starting");
    try {
      await work(stopping.signal);
    } catch (error) {
      if (error.name !== "AbortError") {
        if (!(error instanceof ApiError)) throw error;
        write(byId("simulated-error"), error.message);
      }
    } finally {
      this._stopping = null;
      byId("simulate-go").disabled = byId("story").disabled = false;
      byId("simulate-stop").disabled = true;
      write(byId("simulated-progress"), "");
    }
  }

  // Await a simulation's result, and show how far it is.
  async _result(what, body, signal) {
    const running = simulate(what, body, signal);
    for (;;) {
      const { value, done } = await running.next();
      if (done) return value;
      write(byId("simulated-progress"), `${value.what}: ${value.done} of ${value.of}`);
    }
  }

  _ask() {
    const what = byId("what").value, number = (id) => (byId(id).value === "" ? {} : { [id]: Number(byId(id).value) });
    const body = { devices: byId("where").value.trim(), workload: byId("workload").value, ...number("rate"), ...number("seconds"), ...number("seed") };
    if (byId("presets").value.trim()) body.presets = byId("presets").value.trim();
    if (what === "plan") body.target = Number(byId("target").value) / 100;
    return this._run(async (signal) => this._showResult(await this._result(what, body, signal)));
  }

  _showResult(result) {
    write(byId("simulated-facts"), `${result.workload}; on ${result.devices}`);
    write(byId("simulated-verdict"), result.verdict ?? `Fewest devices with ${percent(result.target)} of requests in their levels:`);
    const plans = result.kind === "plan", table = byId("simulated");
    arrange(table.tHead, [element("tr", {}, ...(plans ? PLANNED : SIMULATED).map(([text, kind]) => element("th", { text, class: kind, scope: "col" })))]);
    arrange(table.tBodies[0], result.presets.map(plans ? planRow : presetRow));
    table.hidden = false;
    this._showModels(plans ? [] : result.presets);
    if (!plans) this._player.offer(result.played.runs.map((run) => filmOfRun(result.played, run, `simulated: ${run.name}`)));
  }

  _showModels(presets) {
    byId("simulated-models").hidden = !presets.length;
    if (!presets.length) return;
    const table = byId("simulated-models-table"), names = Object.keys(presets[0].models);
    arrange(table.tHead, [element("tr", {}, element("th", { text: "model", class: "word", scope: "col" }),
      ...presets.map(({ name }) => element("th", { text: name, class: "word", scope: "col" })))]);
    arrange(table.tBodies[0], names.map((name) => element("tr", {}, element("td", { text: name, class: "word name", title: name }),
      ...presets.map(({ models }) => share(models[name].attainment)))));
  }

  async _history(length, title) {
    const [history, story] = await Promise.all([readHistory(length), hasAdminKey() ? readStory(DECISIONS) : { decisions: [] }]);
    if (history.samples.length < 2) throw new ApiError(200, "nothing has been recorded yet");
    this._player.offer([filmOfHistory(history, story.decisions, title)]);
  }

  async _story(signal) {
    const { played, began, notes, verdict } = await this._result("story/play", null, signal);
    write(byId("simulated-error"), notes.join("; "));
    this._player.offer(played.runs.map((run) => filmOfRun(played, run, `this server's story: ${verdict}`, began)));
  }
}

// A share as a bar and a number.
function share(value) {
  const bar = element("meter", { min: 0, max: 1, value, "aria-hidden": "true" });
  return element("td", { class: "word" }, bar, ` ${percent(value)}`);
}

function presetRow(preset) {
  const time = (quantiles, i) => (quantiles ? seconds(quantiles[i]) : "-");
  const texts = [percent(preset.worst_attainment), time(preset.ttft, 0), time(preset.ttft, 1), time(preset.tpot, 0), time(preset.tpot, 1),
    rate(preset.output_tokens_per_second), preset.activations, preset.evictions, preset.preemptions];
  return element("tr", {}, element("td", { text: preset.name, class: "word" }), share(preset.attainment), ...texts.map((text) => element("td", { text })));
}

function planRow(preset) {
  const number = preset.devices ?? "none suffices";
  return element("tr", {}, element("td", { text: preset.name, class: "word" }), element("td", { text: number }), share(preset.attainment),
    element("td", { text: preset.with_fewer == null ? "-" : percent(preset.with_fewer) }), element("td", { text: percent(preset.alone) }));
}
