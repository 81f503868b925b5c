/** Where the next message is written, sent, and its answer stopped. */

import { button, fill, grow, h } from "./dom.js";

export class Composer {
  constructor(playground, element, say) {
    Object.assign(this, { playground, say });
    this.field = h("textarea", {
      id: "message", rows: "1", placeholder: "Write a message", "aria-label": "Message",
      "aria-describedby": "composer-help", oninput: () => grow(this.field),
      onkeydown: (event) => this._key(event),
    });
    this.send = button("Send", () => this._send(), { class: "primary" });
    this.stop = button("Stop", () => {
      playground.stop();
      this.field.focus();
    }, { class: "primary", title: "Escape" });
    this.buttons = h("div", { class: "composer-buttons" });
    element.append(
      h("div", { class: "composer-box" }, this.field, this.buttons),
      h("p", { class: "help", id: "composer-help" },
        h("kbd", {}, "Enter"), " sends, ", h("kbd", {}, "Shift Enter"), " begins a line, ",
        h("kbd", {}, "Esc"), " stops the answer."));
    this.update();
  }

  update() {
    const busy = this.playground.busy();
    fill(this.buttons, busy ? this.stop : this.send);
  }

  focus() {
    // On a phone the keyboard would cover half of the page.
    if (matchMedia("(pointer: fine)").matches) this.field.focus();
  }

  _key(event) {
    if (event.key !== "Enter" || event.isComposing) return;
    const always = event.ctrlKey || event.metaKey;
    if (!always && (event.shiftKey || !matchMedia("(pointer: fine)").matches)) return;
    event.preventDefault();
    this._send();
  }

  _send() {
    if (!this.playground.send(this.field.value)) return;
    this.field.value = "";
    grow(this.field);
    this.field.focus();
    this.say("The answer is being written.");
  }
}
