/** The figures at the top, each with a line of the last two minutes. */

import { h } from "../../playground/view/dom.js";
import { number, percent, plural, seconds } from "../numbers.js";
import { spark } from "./canvas.js";

const LATENCY_HELP = "Of the last minute";

export class Tiles {
  constructor(place) {
    this.tiles = {};
    for (const [name, label, help] of [
      ["running", "Running", "Sequences with a slot in the engine"],
      ["waiting", "Waiting", "Sequences that wait for a slot or for KV pages"],
      ["generated", "Tokens/s", "Generated tokens a second, of the last five seconds"],
      ["prompt", "Prompt tokens/s", "Computed tokens of prompts a second, without cached ones"],
      ["first", "Time to first token", LATENCY_HELP],
      ["inter", "Inter-token latency", LATENCY_HELP],
      ["used", "KV in use", "Pages that sequences hold; free and cached ones are not in use"],
      ["hits", "Prefix cache", "Prompt tokens of the last minute that were in the cache"],
    ]) {
      const tile = {
        value: h("p", { class: "value" }, "–"),
        note: h("p", { class: "note" }),
        line: name === "hits" ? null : h("canvas", { "aria-hidden": "true" }),
      };
      this.tiles[name] = tile;
      const chart = tile.line ? h("div", { class: "spark" }, tile.line) : null;
      place.append(h("div", { class: "tile", id: `tile-${name}`, title: help }, h("h3", {}, label), tile.value, tile.note, chart));
    }
  }

  show(event, history) {
    const { stats, pages } = event.engine;
    const { lines } = history;
    const total = pages.free + pages.cached + pages.shared + pages.owned;
    this._set("running", number(stats.running), `of ${event.server.max_num_seqs} slots`, event.server.max_num_seqs);
    this._set("waiting", number(stats.waiting), plural(stats.preemptions, "preemption"));
    this._set("generated", number(lines.generated.at(-1)), plural(stats.generated_tokens, "token"));
    this._set("prompt", number(lines.prompt.at(-1)), plural(stats.prompt_tokens - stats.cached_tokens, "token"));
    this._latency("first", event.first_token);
    this._latency("inter", event.inter_token);
    this._set("used", percent(lines.used.at(-1)), `${number(pages.shared + pages.owned)} of ${plural(total, "page")}`, 1);
    const all = stats.prompt_tokens ? percent(stats.cached_tokens / stats.prompt_tokens) : "–";
    this._set("hits", percent(history.hits()), `${all} since the engine started`);
    for (const [name, line] of Object.entries(lines)) spark(this.tiles[name].line, line, this.tiles[name].top);
  }

  _latency(name, found) {
    const [half, nine, last] = found.seconds;
    const note = found.count ? `p90 ${seconds(nine)}, p99 ${seconds(last)}` : "none in the last minute";
    this._set(name, seconds(half), note);
  }

  _set(name, value, note, top = 0) {
    const tile = this.tiles[name];
    tile.value.textContent = value;
    tile.note.textContent = note;
    tile.top = top;
  }
}
