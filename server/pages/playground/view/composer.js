/** Where the next message is written, sent, and its answer stopped. */

import { button, fill, grow, h } from "./dom.js";
import { Pictures } from "./pictures.js";

export class Composer {
  /** say is for a screen reader, complain for what was not done; files may be dropped on `target`. */
  constructor(playground, element, { say, complain, target }) {
    Object.assign(this, { playground, say });
    this.pictures = new Pictures(
      () => playground.imageLimits(), () => playground.imagesSent(), complain);
    this.field = h("textarea", {
      id: "message", rows: "1", placeholder: "Write a message", "aria-label": "Message",
      "aria-describedby": "composer-help", oninput: () => grow(this.field),
      onkeydown: (event) => this._key(event), onpaste: (event) => this._paste(event),
    });
    this.send = button("Send", () => this._send(), { class: "primary" });
    this.stop = button("Stop", () => {
      playground.stop();
      this.field.focus();
    }, { class: "primary", title: "Escape" });
    this.buttons = h("div", { class: "composer-buttons" });
    element.append(
      h("div", { class: "composer-box" },
        this.pictures.element, this.pictures.picker, this.field, this.buttons),
      h("p", { class: "help", id: "composer-help" },
        h("kbd", {}, "Enter"), " sends, ", h("kbd", {}, "Shift Enter"), " begins a line, ",
        h("kbd", {}, "Esc"), " stops the answer."));
    target.addEventListener("dragover", (event) => this._over(event));
    target.addEventListener("drop", (event) => this._drop(event));
    this.update();
  }

  update() {
    this.pictures.update();
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

  /** Programs that copy text may add a picture of it: then the text is meant. */
  _paste(event) {
    if ([...(event.clipboardData?.types ?? [])].includes("text/plain")) return;
    if (this.pictures.add(event.clipboardData?.files ?? [])) event.preventDefault();
  }

  _over(event) {
    if ([...(event.dataTransfer?.types ?? [])].includes("Files")) event.preventDefault();
  }

  /** Without it, the browser would leave the page for a file that is dropped beside the field. */
  _drop(event) {
    if (!event.dataTransfer?.files.length) return;
    event.preventDefault();
    this.pictures.add(event.dataTransfer.files);
    this.focus();
  }

  async _send() {
    if (this.pictures.reading && !(await this._filesRead())) return;
    if (!this.playground.send(this.field.value, this.pictures.urls)) return;
    this.pictures.take();
    this.field.value = "";
    grow(this.field);
    this.field.focus();
    this.say("The answer is being written.");
  }

  /** Files that are still being read belong to the message: whether it may be sent with them. */
  async _filesRead() {
    if (this.waiting) return false;
    this.waiting = true;
    const { id } = this.playground.conversation;
    let refused = false;
    try {
      while (this.pictures.reading) refused = (await this.pictures.reading) || refused;
    } finally {
      this.waiting = false;
    }
    return !refused && id === this.playground.conversation.id;
  }
}
