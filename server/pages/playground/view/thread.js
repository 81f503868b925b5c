/** The conversation: the nodes of the selected path, one below the other. */

import { lastNode, pathOf, versionsOf } from "../chat/tree.js";
import { AnswerView } from "./answer.js";
import { button, copyButton, fill, h } from "./dom.js";
import { editor } from "./editor.js";
import { picturesView } from "./pictures.js";
import { resultForm, resultsView } from "./tools.js";

const MOST_PAUSE = 500; // ms between two drawings of an answer that is very long
const NEAR = 80; // px from the end within which the view follows what is written

export class Thread {
  constructor(playground, scroller, element, empty) {
    Object.assign(this, { playground, scroller, element, empty });
    this._views = new Map(); // id of a node -> its view
    this._shown = null; // id of the conversation
    this._pending = new Set();
    this._pause = 0;
    this._following = true; // whether the end stays in sight while the conversation grows
    this._top = 0;
    scroller.addEventListener("scroll", () => this._scrolled());
    const grown = new ResizeObserver(() => this._following && this._toEnd());
    for (const each of [element, scroller]) grown.observe(each); // images grow one and shrink the other
  }

  /** Show the path of the conversation that is open. */
  show() {
    const { conversation } = this.playground;
    const other = this._shown !== conversation.id;
    if (other) this._views.clear();
    this._shown = conversation.id;
    const path = pathOf(conversation);
    for (const node of path) {
      if (!this._views.has(node.id)) this._views.set(node.id, this._make(node));
      this._views.get(node.id).update();
    }
    const focused = this._focused();
    fill(this.element, path.map((node) => this._views.get(node.id).element));
    focused?.();
    this.empty.hidden = path.length > 0;
    const writing = path.at(-1)?.entries?.some((entry) => entry.state === "writing");
    if (other || writing) this._following = true;
    if (this._following) this._toEnd();
  }

  /** What gives the focus to the button that takes the place of the one that has it. */
  _focused() {
    const active = document.activeElement;
    const place = [...this.element.children].indexOf(active?.closest(".turn"));
    const label = active?.getAttribute("aria-label") ?? active?.textContent;
    if (place < 0 || active.localName !== "button") return null;
    return () => {
      const buttons = [...(this.element.children[place]?.querySelectorAll("button:enabled") ?? [])];
      if (buttons.includes(document.activeElement)) return;
      const named = (one) => (one.getAttribute("aria-label") ?? one.textContent) === label;
      (buttons.find(named) ?? buttons[0])?.focus();
    };
  }

  /** A node has changed: draw it with the next frame. */
  changed(node) {
    if (!this._pending.size) {
      setTimeout(() => requestAnimationFrame(() => this._draw()), this._pause);
    }
    this._pending.add(node);
  }

  _draw() {
    const began = performance.now();
    for (const node of this._pending) this._views.get(node.id)?.update();
    this._pending.clear();
    // Drawing takes a quarter of the time at most: typing and scrolling stay smooth.
    const took = performance.now() - began;
    this._pause = took < 8 ? 0 : Math.min(MOST_PAUSE, 3 * took);
    if (this._following) this._toEnd();
  }

  /** Who scrolls up wants to read; who comes back to the end wants to follow. */
  _scrolled() {
    const { scrollHeight, scrollTop, clientHeight } = this.scroller;
    const atEnd = scrollHeight - scrollTop - clientHeight < NEAR;
    this._following = atEnd || (this._following && scrollTop >= this._top);
    this._top = scrollTop;
  }

  _toEnd() {
    this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  _make(node) {
    if (node.kind === "user") return new UserView(this.playground, node);
    if (node.kind === "answers") return new AnswersView(this.playground, node);
    const label = "Results of the tools";
    const element = h("article", { class: "turn results", "aria-label": label },
      h("p", { class: "answer-name" }, label), resultsView(node));
    return { element, update() {} };
  }
}

/** ‹ 2/3 › where a node has siblings. */
function versions(playground, node) {
  const { index, ids } = versionsOf(playground.conversation, node);
  if (ids.length < 2) return null;
  const step = (by, sign, label) =>
    button(sign, () => playground.select(ids[index + by]), {
      "aria-label": label, disabled: ids[index + by] === undefined,
    });
  return h("span", { class: "versions" },
    step(-1, "‹", "Version before"), `${index + 1}/${ids.length}`, step(1, "›", "Next version"));
}

function branchButton(playground, node) {
  return button("Branch", () => playground.branch(node), {
    title: "A new conversation that begins with all up to here",
  });
}

class UserView {
  constructor(playground, node) {
    Object.assign(this, { playground, node });
    this.element = h("article", { class: "turn user", "aria-label": "You" });
    this._editor = null;
  }

  update() {
    const { playground, node } = this;
    if (this._editor) return;
    const shown = [picturesView(node.images), node.text && h("p", { class: "user-text" }, node.text)];
    this.element.replaceChildren(
      ...shown.filter(Boolean),
      h("div", { class: "actions" },
        button("Edit", () => this._edit()),
        copyButton("Copy", () => node.text),
        ...[versions(playground, node)].filter(Boolean)));
  }

  _edit() {
    this._editor = editor(this.node.text, "Send", (text) => {
      if (text !== null && !this.playground.edit(this.node, text)) return false;
      this._editor = null;
      this.update();
      return true;
    });
    this.element.replaceChildren(this._editor);
    this._editor.focusText();
  }
}

class AnswersView {
  constructor(playground, node) {
    Object.assign(this, { playground, node });
    const alone = node.entries.length === 1;
    this.actions = h("div", { class: alone ? "actions" : "actions row-actions" });
    this.answers = node.entries.map((_, index) =>
      new AnswerView(playground, node, index, alone ? this.actions : null));
    this.columns = h("div", { class: `columns columns-${Math.min(4, this.answers.length)}` },
      this.answers.map((answer) => answer.element));
    this.forms = null;
    this.element = h("article", { class: "turn answers", "aria-label": "Answer" }, this.columns);
  }

  update() {
    const { playground, node } = this;
    for (const answer of this.answers) answer.update();
    const writing = node.entries.some((entry) => entry.state === "writing");
    const below = !writing && this.answers.length > 1 && this.actions;
    fill(this.element, this.columns, !writing && this._form(), below);
    if (writing) return;
    this.actions.replaceChildren(
      button("Retry", () => playground.retry(node), { title: "Another answer, with today's settings" }),
      branchButton(playground, node),
      ...[versions(playground, node)].filter(Boolean));
  }

  /** Where calls wait for results, at the end of the conversation. */
  _form() {
    const { playground, node } = this;
    const calling = node.entries.filter((entry) => entry.calls.length && entry.state === "done");
    if (!calling.length || lastNode(playground.conversation) !== node) return null;
    this.forms ??= node.entries.map((entry) => entry.calls.length
      ? resultForm(entry.calls, () => this._send()) : null);
    this.formBox ??= h("div", { class: this.columns.className }, this.forms.map((form) => form ?? h("div")));
    return this.formBox;
  }

  _send() {
    const results = {};
    this.forms.forEach((form, index) => {
      if (form) results[index] = form.results();
    });
    this.playground.sendResults(this.node, results);
  }
}
