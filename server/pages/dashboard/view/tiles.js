/** The figures at the top, each with a line of the last two minutes. */

import { h } from "../../playground/view/dom.js";
import { number, percent, plural, seconds } from "../numbers.js";
import { spark } from "./canvas.js";

export class Tiles {
  constructor(place) {
    this.tiles = {};
    for (const [name, label, help] of [
      ["running", "Running", "Sequences with a slot in the engine"],
      ["waiting", "Waiting", "Sequences that wait for a slot or for KV pages"],
      ["generated", "Tokens/s", "Generated tokens a second, of the last five seconds"],
      ["prompt", "Prompt tokens/s", "Computed tokens of prompts a second, without cached ones"],
      ["first", "First token, p50", "Time to the first token, of the last minute"],
      ["inter", "Inter-token, p50", "Inter-token latency, of the last minute"],
      ["used", "KV in use", "Pages that sequences hold; free and cached ones are not in use"],
      ["hits", "Prefix cache", "Prompt tokens of the last minute that were in the cache"],
    ]) {
      const tile = {
        value: h("p", { class: "value" }, "–"),
        note: h("p", { class: "note" }),
        line: h("canvas", { "aria-hidden": "true" }),
      };
      this.tiles[name] = tile;
      place.append(
        h("div", { class: "tile", id: `tile-${name}`, title: help },
          h("h3", {}, label), tile.value, tile.note, h("div", { class: "spark" }, tile.line)));
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
    const all = stats.prompt_tokens ? stats.cached_tokens / stats.prompt_tokens : null;
    // A page that was just opened has seen no prompt yet.
    this._set("hits", percent(lines.hits.at(-1) ?? all), `${percent(all)} since the start`, 1);
    for (const [name, line] of Object.entries(lines)) spark(this.tiles[name].line, line, this.tiles[name].top);
  }

  _latency(name, found) {
    const [half, nine, last] = found.seconds;
    const note = found.count ? `p90\u00a0${seconds(nine)}, p99\u00a0${seconds(last)}` : "none for a minute";
    this._set(name, seconds(half), note);
  }

  _set(name, value, note, top = 0) {
    const tile = this.tiles[name];
    tile.value.textContent = value;
    tile.note.textContent = note;
    tile.top = top;
  }
}
