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
    this.maps = []; // of all pages, or of each group of layers
    this.place = h("div");
    this.counts = KINDS.map(() => h("b"));
    this.owned = h("b");
    const entry = (swatch, text, count) => h("li", {}, swatch, " ", text, " ", count);
    place.append(
      this.place,
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
    const { pages, page_groups: groups, sequences } = event.engine;
    const counts = [pages.free, pages.cached, pages.shared];
    const total = counts[0] + counts[1] + counts[2] + pages.owned;
    counts.forEach((count, kind) => (this.counts[kind].textContent = number(count)));
    this.owned.textContent = number(pages.owned);
    const cell = pages.pages_per_cell === 1 ? "a page" : plural(pages.pages_per_cell, "page");
    const shared = groups.length ? `; groups of layers take pages of one pool, ${number(pages.free)} are free` : "";
    this.lead.textContent =
      `${plural(total, "page")} of ${event.server.page_size} tokens; a square is ${cell}${shared}`;
    const maps = groups.length ? groups : [pages];
    this._fit(maps.length);
    const ids = sequences.map((each) => each.id);
    const size = this._size(maps);
    maps.forEach((map, place) => {
      const { canvas, title } = this.maps[place];
      const group = groups.length ? groupName(event.server.group_windows[place]) : "";
      const held = map.shared + map.owned;
      title.textContent = group && `${group}: ${number(held)} in use, ${number(map.cached)} cached`;
      const free = groups.length ? "" : `${map.free} free, `;
      canvas.setAttribute("aria-label",
        `Map of the KV pages${group && `, ${group}`}: ${free}${map.cached} cached, ${map.shared} shared, ${map.owned} of one sequence`);
      draw(canvas, map.runs, ids, focus, size);
    });
  }

  /** As many canvases as there are maps. */
  _fit(count) {
    if (this.maps.length === count) return;
    this.maps = Array.from({ length: count }, () => ({
      title: h("h3"),
      canvas: h("canvas", { role: "img" }),
    }));
    const several = count > 1;
    this.place.replaceChildren(
      ...this.maps.flatMap(({ title, canvas }) => (several ? [title, canvas] : [canvas])));
  }

  /** Pixels of a square: as large as they can be in a place about half as high as it is wide. */
  _size(maps) {
    const width = this.place.clientWidth;
    const cells = maps.reduce((sum, map) => sum + numCells(map.runs), 0);
    return Math.max(4, Math.min(16, Math.floor(Math.sqrt((width * Math.max(width * 0.56, 150)) / cells))));
  }
}

function groupName(window) {
  return window ? `Layers with a window of ${number(window)}` : "Layers with full attention";
}

function numCells(runs) {
  let cells = 0;
  for (let place = 1; place < runs.length; place += 2) cells += runs[place];
  return cells;
}

function draw(canvas, runs, ids, focus, size) {
  const columns = Math.max(1, Math.floor(canvas.parentElement.clientWidth / size));
  const { pen } = context(canvas, Math.max(1, Math.ceil(numCells(runs) / columns)) * size);
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
