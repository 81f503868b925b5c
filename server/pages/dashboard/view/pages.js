/** The KV pages as a map, in the order of their memory. */

import { h } from "../../playground/view/dom.js";
import { number, plural } from "../numbers.js";
import { colour, context, sequenceColour } from "./canvas.js";

const FIRST_OWNER = 3; // kinds before it: free, cached, shared
const KINDS = [
  ["--map-free", "free", "free"],
  ["--map-cached", "cached", "cached: free to take, and what they hold may still be hit"],
  ["--map-shared", "shared", "shared by several sequences"],
];

export class PageMap {
  constructor(place, lead) {
    this.lead = lead;
    this.canvas = h("canvas", { role: "img", "aria-label": "Map of the KV pages" });
    this.counts = KINDS.map(() => h("b"));
    this.owned = h("b");
    const entry = (swatch, text, count) => h("li", {}, swatch, " ", text, " ", count);
    place.append(
      h("div", {}, this.canvas),
      h("ul", { class: "legend" },
        KINDS.map(([, name, help], kind) => {
          const item = entry(h("i", { class: `swatch ${name}` }), name, this.counts[kind]);
          item.title = help;
          return item;
        }),
        entry(h("i", { class: "swatch owned" }), "of one sequence, each in its colour", this.owned)),
    );
  }

  show(event, focus) {
    const { pages, sequences } = event.engine;
    const counts = [pages.free, pages.cached, pages.shared];
    const total = counts[0] + counts[1] + counts[2] + pages.owned;
    counts.forEach((count, kind) => (this.counts[kind].textContent = number(count)));
    this.owned.textContent = number(pages.owned);
    const cell = pages.pages_per_cell === 1 ? "a page" : plural(pages.pages_per_cell, "page");
    this.lead.textContent =
      `${plural(total, "page")} of ${event.server.page_size} tokens; a square is ${cell}`;
    this.canvas.setAttribute("aria-label",
      `Map of the KV pages: ${counts[0]} free, ${counts[1]} cached, ${counts[2]} shared, ${pages.owned} of one sequence`);
    this._draw(pages.runs, sequences.map((each) => each.id), focus);
  }

  _draw(runs, ids, focus) {
    let cells = 0;
    for (let place = 1; place < runs.length; place += 2) cells += runs[place];
    const width = this.canvas.parentElement.clientWidth;
    // Squares as large as they can be in a place that is about half as high as it is wide.
    const size = Math.max(4, Math.min(16, Math.floor(Math.sqrt((width * Math.max(width * 0.56, 150)) / cells))));
    const columns = Math.max(1, Math.floor(width / size));
    const { pen } = context(this.canvas, Math.ceil(cells / columns) * size);
    const gap = size > 5 ? 1 : 0.5;
    let cell = 0;
    for (let place = 0; place < runs.length; place += 2) {
      const kind = runs[place];
      const id = ids[kind - FIRST_OWNER];
      pen.fillStyle = kind < FIRST_OWNER ? colour(KINDS[kind][0]) : sequenceColour(id, focus && focus !== id);
      for (const end = cell + runs[place + 1]; cell < end; cell += 1) {
        pen.fillRect((cell % columns) * size, Math.floor(cell / columns) * size, size - gap, size - gap);
      }
    }
  }
}
