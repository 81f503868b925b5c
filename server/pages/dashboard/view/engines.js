/** Which engine of several the page shows: a button for each, with its load. */

import { percent } from "../numbers.js";

export class Engines {
  /** place: the element of the buttons; choose(index): called when a reader wants another one */
  constructor(place, choose) {
    this.place = place;
    this.choose = choose;
    this.buttons = [];
  }

  show({ engines, shown }) {
    this.place.hidden = engines.length < 2;
    if (this.place.hidden) return;
    while (this.buttons.length < engines.length) this.#add(this.buttons.length);
    engines.forEach((engine, index) => {
      const button = this.buttons[index];
      const load = engine.state === "ready" ? `${engine.running} running, ${engine.waiting} waiting, KV ${percent(engine.kv)}` : engine.state;
      button.textContent = `Engine ${index}: ${load}`;
      button.setAttribute("aria-pressed", String(index === shown));
    });
  }

  #add(index) {
    const button = document.createElement("button");
    button.type = "button";
    button.addEventListener("click", () => this.choose(index));
    this.place.append(button);
    this.buttons.push(button);
  }
}
