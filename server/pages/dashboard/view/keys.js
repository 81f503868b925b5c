/** Running, waiting and tokens by API key. */

import { h } from "../../playground/view/dom.js";
import { number } from "../numbers.js";

const COLUMNS = ["Key", "Running", "Waiting", "Tokens/s", "Finished"];

export class Keys {
  constructor(place, lead) {
    this.lead = lead;
    this.body = h("tbody");
    this.table = h("table", {}, h("thead", {}, h("tr", {}, COLUMNS.map((name) => h("th", { scope: "col" }, name)))), this.body);
    place.append(this.table);
  }

  show(event, history) {
    const names = Object.keys(event.keys).sort();
    const without = !event.server.keys;
    this.lead.textContent = without
      ? "This server has no API keys: all requests are counted together."
      : names.length ? "Running and waiting are sequences, finished are requests." : "No request yet.";
    this.table.hidden = names.length === 0;
    this.body.replaceChildren(...names.map((name) => {
      const row = event.keys[name];
      const cells = [row.running, row.waiting, history.keyRate(name), row.requests];
      return h("tr", {}, h("th", { scope: "row" }, name || (without ? "all" : "batches")), cells.map((value) => h("td", {}, number(value))));
    }));
  }
}
