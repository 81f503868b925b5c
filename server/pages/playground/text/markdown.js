/**
 * Markdown as DOM nodes.
 *
 * marked reads it into tokens, and the nodes are made here one by one: HTML in it stays text, links
 * lead only to the web or to mail, pictures become links.  So a model's answer cannot run anything.
 */

import { Marked } from "../../vendor/marked.esm.js";
import { copyButton, h } from "../view/dom.js";
import { formula, mathsExtensions } from "./maths.js";

const reader = new Marked({ gfm: true, breaks: true, extensions: mathsExtensions });
const LIMIT = 300_000; // characters; longer texts are shown as they are
const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };
const shown = new WeakMap(); // element -> {blocks: [{raw, node}], links} of what it shows

/** Show this text in an element; blocks that have not changed keep their nodes. */
export function showMarkdown(element, text) {
  const tokens = text.length > LIMIT ? [{ type: "code", raw: text, text }] : reader.lexer(text);
  const links = JSON.stringify(tokens.links ?? {});
  const before = shown.get(element);
  const old = before?.links === links ? before.blocks : [];
  const blocks = tokens
    .filter((token) => token.type !== "space" && token.type !== "def")
    .map((token, place) =>
      old[place]?.raw === token.raw ? old[place] : { raw: token.raw, node: block(token) },
    );
  const kept = blocks.findIndex((each, place) => each !== old[place]);
  const from = kept < 0 ? blocks.length : kept;
  if (!before || before.links !== links) element.replaceChildren();
  while (element.childNodes.length > from) element.lastChild.remove();
  element.append(...blocks.slice(from).map((each) => each.node));
  shown.set(element, { blocks, links });
}

function block(token) {
  switch (token.type) {
    case "heading":
      // Below the page's own headings.
      return h(`h${Math.min(6, token.depth + 2)}`, {}, inline(token.tokens));
    case "paragraph":
      return h("p", {}, inline(token.tokens));
    case "code":
      return codeBlock(token.text, (token.lang ?? "").split(/\s/)[0]);
    case "blockquote":
      return h("blockquote", {}, token.tokens.map(block));
    case "list":
      return list(token);
    case "table":
      return table(token);
    case "hr":
      return h("hr");
    case "mathsBlock":
      return formula(token.tex, true);
    case "html":
      return h("p", { class: "markup" }, token.text);
    case "text":
      return h("span", {}, token.tokens ? inline(token.tokens) : plain(token.text));
    default:
      return token.type === "space" ? "" : inlineOne(token);
  }
}

export function codeBlock(text, language = "") {
  const head = h("div", { class: "code-head" }, h("span", {}, language.slice(0, 30)),
    copyButton("Copy", () => text, { "aria-label": "Copy the code" }));
  // Focus lets the keyboard scroll it.
  const code = h("pre", { tabindex: "0" }, h("code", {}, text));
  return h("div", { class: "code" }, head, code);
}

function list(token) {
  const items = token.items.map((item) => {
    const box = item.task && h("input", {
      type: "checkbox", disabled: true, checked: item.checked, "aria-label": "task",
    });
    const rest = item.tokens.filter((each) => each.type !== "checkbox").map(block);
    return h("li", { class: item.task ? "task" : null }, box, rest);
  });
  const start = token.ordered && Number(token.start) !== 1 ? String(Number(token.start)) : null;
  return h(token.ordered ? "ol" : "ul", { start }, items);
}

function table(token) {
  const row = (cells, name) => h("tr", {}, cells.map((cell) =>
    h(name, { class: cell.align ? `to-${cell.align}` : null }, inline(cell.tokens))));
  return h("div", { class: "table", tabindex: "0" }, h("table", {},
    h("thead", {}, row(token.header, "th")),
    h("tbody", {}, token.rows.map((cells) => row(cells, "td")))));
}

function inline(tokens = []) {
  return tokens.flatMap(inlineOne);
}

function inlineOne(token) {
  switch (token.type) {
    case "strong":
    case "em":
    case "del":
      return h(token.type, {}, inline(token.tokens));
    case "codespan":
      return h("code", {}, token.text);
    case "br":
      return h("br");
    case "link":
      return link(token.href, inline(token.tokens), token.title);
    case "image":
      return link(token.href, [`[picture: ${token.text || token.href}]`], token.title);
    case "maths":
      return formula(token.tex, token.display);
    case "html":
      return /^<br\s*\/?>$/i.test(token.text) ? h("br") : token.text;
    case "escape":
      return token.text;
    case "checkbox":
      return [];
    case "text":
      return token.tokens ? inline(token.tokens) : plain(token.text);
    default:
      return token.raw;
  }
}

function link(href, children, title) {
  let target;
  try {
    target = new URL(href);
  } catch {
    target = null; // relative: it would lead to this server
  }
  if (!target || !SCHEMES.has(target.protocol)) return h("span", { title: href }, children);
  const rel = "noopener noreferrer nofollow";
  return h("a", { href: target.href, target: "_blank", rel, title: title || href }, children);
}

/** Text with the few references to characters that are common; others stay as they are. */
function plain(text) {
  return text.replace(/&(?:#(\d{1,7})|#x([0-9a-f]{1,6})|([a-z]+));/gi, (whole, ten, hex, name) => {
    if (name) return ENTITIES[name] ?? whole;
    const point = ten ? Number(ten) : Number.parseInt(hex, 16);
    return point > 0 && point <= 0x10ffff ? String.fromCodePoint(point) : whole;
  });
}
