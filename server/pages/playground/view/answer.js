/** One answer: reasoning, text, calls, figures, and what can be done with it. */

import { SNIPPETS } from "../chat/request.js";
import { speedOf } from "../chat/answering.js";
import { codeBlock, showMarkdown } from "../text/markdown.js";
import { button, copyButton, copyText, fill, h } from "./dom.js";
import { editor } from "./editor.js";
import { tokenView } from "./tokens.js";
import { callView, pretty } from "./tools.js";

const ENDS = {
  length: "cut off at the most tokens", tool_calls: "waits for results", edited: "edited",
};

export class AnswerView {
  /** playground: what can be done; node and index: whose entry it shows; more: an element for
   *  what can be done with the whole node, where this is its only answer
   */
  constructor(playground, node, index, more) {
    Object.assign(this, { playground, node, index, more, entry: node.entries[index] });
    this._tokens = false;
    this._editor = null;
    this.name = h("p", { class: "answer-name" });
    this.thought = h("div", { class: "text" });
    this.summary = h("summary", {}, "Reasoning");
    this.reasoning = h("details", { class: "reasoning" }, this.summary, this.thought);
    this.text = h("div", { class: "text answer-text" });
    this.calls = h("div", { class: "calls" });
    this.error = h("p", { class: "error", role: "alert" });
    this.figures = h("p", { class: "figures" });
    this.actions = h("div", { class: "actions" });
    this.element = h("section", { class: "answer" });
    this._makeActions();
    this.update();
  }

  _makeActions() {
    this.copy = copyButton("Copy", () => this.entry.content);
    this.tokenSwitch = button("Tokens", () => {
      this._tokens = !this._tokens;
      this.update();
    }, { "aria-pressed": "false", title: "Show how likely each token was" });
    this.edit = button("Edit", () => this._edit());
    this.keep = button("Go on with this", () => this.playground.keep(this.node, this.index), {
      title: "All further messages follow this answer",
    });
    this.actions.append(this.copy, this.tokenSwitch, this.edit, this._copyAs(), this.keep);
    if (this.more) this.actions.append(this.more);
  }

  _copyAs() {
    const { playground, node, entry } = this;
    const items = Object.entries(SNIPPETS).map(([name, write]) =>
      button(name, async (event) => {
        const body = playground.bodyFor(node.parent, entry.lane, entry.settings);
        const copied = await copyText(write(playground.api.base, body, Boolean(playground.api.key)));
        event.target.textContent = copied ? "Copied" : "Not copied";
        setTimeout(() => {
          event.target.textContent = name;
          menu.open = false;
        }, 900);
      }));
    const menu = h("details", { class: "menu", onkeydown: (event) => {
      if (event.key !== "Escape" || !menu.open) return;
      event.stopPropagation();
      menu.open = false;
      menu.firstChild.focus();
    }, onfocusout: (event) => {
      if (event.relatedTarget && !menu.contains(event.relatedTarget)) menu.open = false;
    } }, h("summary", { title: "The request as a command" }, "Copy as"), h("div", {}, items));
    return menu;
  }

  _edit() {
    this._editor = editor(this.entry.content, "Save as a new version", (text) => {
      this._editor = null;
      if (text === null) this.update();
      else this.playground.rewrite(this.node, this.index, text);
      return true;
    });
    this.update();
    this._editor.focusText();
  }

  update() {
    const { entry, node } = this;
    const writing = entry.state === "writing";
    const several = node.entries.length > 1;
    this._name(several);
    this.element.setAttribute("aria-busy", String(writing));
    this.element.classList.toggle("kept", node.kept === this.index);
    if (entry.reasoning) showMarkdown(this.thought, entry.reasoning);
    this.summary.textContent = writing && !entry.content ? "Thinking…" : "Reasoning";
    this._text();
    const calls = JSON.stringify(entry.calls);
    if (calls !== this._calls) fill(this.calls, entry.calls.map(callView));
    this._calls = calls;
    this.error.textContent = entry.error ?? "";
    this.figures.textContent = figuresOf(entry);
    this.tokenSwitch.setAttribute("aria-pressed", String(this._tokens));
    this.tokenSwitch.hidden = !entry.logprobs.length || writing;
    this.keep.hidden = !several || writing;
    this.keep.setAttribute("aria-pressed", String(node.kept === this.index));
    this.edit.hidden = writing || !entry.content;
    this.copy.hidden = !entry.content;
    fill(this.element,
      this.name,
      entry.reasoning && this.reasoning,
      this._editor ?? (this._hasText() && this.text),
      entry.calls.length > 0 && this.calls,
      entry.error && this.error,
      this.figures,
      !writing && !this._editor && this.actions);
  }

  _name(several) {
    const { entry } = this;
    const letter = several ? `${"ABCD"[entry.lane] ?? entry.lane + 1} · ` : "";
    const choice = Number(entry.settings.values.n) > 1 ? ` · ${entry.choice + 1}` : "";
    this.name.textContent = letter + (entry.settings.model || "answer") + choice;
  }

  _isWaiting() {
    const { entry } = this;
    return entry.state === "writing" && !(entry.content || entry.reasoning || entry.calls.length);
  }

  _hasText() {
    return this.entry.content || this._isWaiting() || this._tokens;
  }

  _text() {
    const { entry } = this;
    this.text.classList.toggle("waiting", this._isWaiting());
    if (this._tokens && entry.state !== "writing") {
      if (!this._tokenView) this._tokenView = tokenView(entry.logprobs);
      return fill(this.text, this._tokenView);
    }
    const kind = entry.settings.values.response_format?.kind;
    if (entry.content && (kind === "json_object" || kind === "json_schema")) {
      if (this._shown === entry.content) return fill(this.text, this._json);
      this._shown = entry.content;
      this._json = codeBlock(pretty(entry.content), "json");
      return fill(this.text, this._json);
    }
    if (!this._markdown) this._markdown = h("div");
    showMarkdown(this._markdown, entry.content);
    return fill(this.text, this._markdown);
  }
}

/** What it cost: tokens, speed, waiting, and how it ended. */
export function figuresOf(entry) {
  const parts = [];
  if (entry.promptTokens) {
    const cached = entry.cachedTokens ? ` (${entry.cachedTokens} cached)` : "";
    parts.push(`${entry.promptTokens} prompt tokens${cached}`);
  }
  if (entry.tokens) parts.push(`${entry.tokens} tokens`);
  const speed = speedOf(entry);
  if (speed) parts.push(`${speed < 10 ? speed.toFixed(1) : Math.round(speed)} tokens/s`);
  if (entry.firstSeconds !== null) parts.push(`first after ${Math.round(entry.firstSeconds * 1000)}\u00a0ms`);
  if (entry.state === "stopped") parts.push("stopped");
  else if (ENDS[entry.finish]) parts.push(ENDS[entry.finish]);
  return parts.join(" · ");
}
