/** The last requests, each with its timeline. */

import { h } from "../../playground/view/dom.js";
import { number, plural, seconds } from "../numbers.js";
import { sequenceColour } from "./canvas.js";
import { describe, phasesOf } from "./timeline.js";

const COLUMNS = ["Request", "Key", "State", "Prompt", "Answer", "Timeline", "Total"];
const LEGEND = [["queue", "queue"], ["chunk", "chunks of the prompt"], ["decode", "decode"], ["preempted", "preempted"]];
const SHOWN = 40;

export class Requests {
  /** focused(id): the sequence that the reader points at, or 0 */
  constructor(place, lead, focused) {
    this.lead = lead;
    this.focused = focused;
    this.rows = new Map(); // by id
    this.chosen = "";
    this.body = h("tbody");
    this.table = h("table", {}, h("thead", {}, h("tr", {}, COLUMNS.map((name) => h("th", { scope: "col" }, name)))), this.body);
    this.scale = h("span");
    place.append(
      h("ul", { class: "legend" },
        LEGEND.map(([kind, name]) => h("li", {}, h("i", { class: `swatch ${kind}` }), ` ${name}`)),
        h("li", { class: "scale" }, this.scale)),
      this.table);
    this.table.hidden = true;
  }

  show(event) {
    const live = new Map();
    if (event.engine) for (const each of [...event.engine.sequences, ...event.engine.waiting]) live.set(each.id, each);
    const now = event.at;
    const open = (each) => each.state === "queued" || each.state === "running";
    // Open ones first; a stable order keeps rows where they are.
    const requests = [...event.requests].sort((a, b) => open(b) - open(a)).slice(0, SHOWN);
    this.table.hidden = requests.length === 0;
    this.lead.textContent = event.remembered === 0
      ? "The server remembers no requests (--request-history 0)."
      : requests.length === 0 ? "None yet." : `${number(event.open)} open; point at one to see its pages and its part of the waves.`;
    const all = requests.map((each) => phasesOf(each, live.get(each.sequence), now));
    const longest = Math.max(...all.map((phases) => phases.at(-1).to), 0.001);
    this.scale.textContent = `the whole width is ${seconds(longest)}`;
    const rows = requests.map((each, place) => this._row(each, live.get(each.sequence), all[place], longest));
    const ids = new Set(requests.map((each) => each.id));
    for (const id of this.rows.keys()) if (!ids.has(id)) this.rows.delete(id);
    rows.forEach((row, place) => {
      if (this.body.children[place] !== row) this.body.insertBefore(row, this.body.children[place] ?? null);
    });
    while (this.body.children.length > rows.length) this.body.lastChild.remove();
  }

  _row(request, live, phases, longest) {
    let row = this.rows.get(request.id);
    if (!row) this.rows.set(request.id, (row = this._create(request)));
    const { cells } = row;
    const held = live && request.state === "running";
    row.swatch.style.background = held ? sequenceColour(request.sequence) : "";
    const state = live?.state === "prefill" || live?.state === "held" ? live.state : request.state;
    const preempted = Math.max(live?.preemptions ?? 0, request.preemptions);
    row.element.className = `state-${request.state}`;
    set(cells.key, request.key || "–");
    set(cells.state, preempted ? `${state}, preempted ${preempted}×` : state);
    const cached = Math.max(live?.cached_tokens ?? 0, request.cached_tokens);
    set(cells.prompt, cached ? `${number(request.prompt_tokens)} (${number(cached)} cached)` : number(request.prompt_tokens));
    set(cells.answer, number(request.completion_tokens));
    set(cells.total, seconds(phases.at(-1).to));
    row.line.replaceChildren(...phases.map((phase) => {
      const piece = h("i", { class: phase.kind });
      piece.style.left = `${(100 * phase.from) / longest}%`;
      piece.style.width = `${(100 * (phase.to - phase.from)) / longest}%`;
      return piece;
    }));
    row.line.setAttribute("aria-label", describe(phases));
    row.line.title = describe(phases);
    set(row.detail, this.chosen === request.id ? describe(phases) : "");
    return row.element;
  }

  _create(request) {
    const choose = h("button", {
      type: "button", class: "id", "aria-pressed": "false", title: request.id,
      onclick: () => this._choose(request.id),
    }, h("i", { class: "swatch" }), ` ${request.route}${request.batch ? ", batch" : ""}${request.choices > 1 ? ` ×${request.choices}` : ""} `, h("code", {}, request.id.slice(0, 6)));
    const cell = (name) => h("td", { class: name });
    const cells = { key: cell("key"), state: cell("state"), prompt: cell("prompt"), answer: cell("answer"), total: cell("total") };
    const line = h("div", { class: "line", role: "img" });
    const detail = h("p", { class: "note" });
    const element = h("tr", {
      onpointerenter: () => this.focused(request.sequence),
      onpointerleave: () => this.focused(0),
    }, h("th", { scope: "row" }, choose), cells.key, cells.state, cells.prompt, cells.answer, h("td", { class: "time" }, line, detail), cells.total);
    return { element, cells, line, detail, choose, swatch: choose.querySelector(".swatch"), sequence: request.sequence };
  }

  /** Keep one request in focus, with its phases in words; again to let it go. */
  _choose(id) {
    this.chosen = this.chosen === id ? "" : id;
    for (const [each, row] of this.rows) {
      row.choose.setAttribute("aria-pressed", String(each === this.chosen));
      set(row.detail, each === this.chosen ? row.line.title : "");
    }
    this.focused(this.kept);
  }

  get kept() {
    return this.rows.get(this.chosen)?.sequence ?? 0;
  }
}

function set(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
