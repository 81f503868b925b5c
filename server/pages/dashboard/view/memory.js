/** How the device's memory is divided. */

import { h } from "../../playground/view/dom.js";
import { bytes, percent, sum } from "../numbers.js";

export class Memory {
  constructor(place, lead) {
    this.place = place;
    this.lead = lead;
    this.shown = "";
  }

  show(event) {
    const { memory, device, dtype, max_model_len: longest } = event.server;
    const { pages } = event.engine;
    const total = pages.free + pages.cached + pages.shared + pages.owned;
    const used = (pages.shared + pages.owned) / total;
    const parts = memory.flatMap(([name, count]) =>
      name === "KV" ? [["KV in use", count * used], ["KV not in use", count * (1 - used)]] : [[name, count]]);
    const all = sum(parts.map(([, count]) => count));
    this.lead.textContent = `${bytes(all)} on ${device} in ${dtype}; up to ${longest} tokens a request`;
    const bar = h("div", { class: "bar", role: "img", "aria-label": parts.map(([name, count]) => `${name} ${bytes(count)}`).join(", ") });
    const list = h("ul", { class: "legend" });
    parts.forEach(([name, count], place) => {
      const kind = name === "KV not in use" ? "rest" : name === "unused" ? "unused" : `part${place % 5}`;
      const piece = h("i", { class: kind });
      piece.style.width = `${(100 * count) / all}%`;
      bar.append(piece);
      list.append(h("li", {}, h("i", { class: `swatch ${kind}` }), ` ${name} `, h("b", {}, bytes(count)), ` ${percent(count / all)}`));
    });
    this.place.replaceChildren(bar, list);
  }
}
