/**
 * TeX in markdown: $..$, \(..\), $$..$$ and \[..\], shown as MathML, which the browser lays out.
 *
 * The library is loaded when the first formula comes.
 */

import { h } from "../view/dom.js";

const LIMIT = 4000; // characters of a formula
let temml = null;
let loading = null;

const BLOCK = /^ {0,3}(?:\$\$([\s\S]+?)\$\$|\\\[([\s\S]+?)\\\]) *(?:\n|$)/;
// As in Pandoc, a dollar that opens has text behind it, one that closes has text before it and no
// digit behind it: "$5 and $6" is money.
const INLINE =
  /^(?:\$\$([^$]+?)\$\$|\\\(([\s\S]+?)\\\)|\\\[([\s\S]+?)\\\]|\$((?! |\n)(?:\\[\s\S]|[^$\\\n])*?(?:\\[\s\S]|[^\s$\\]))\$(?!\d))/;

/** For marked: tokens {type: "maths", tex, display}. */
export const mathsExtensions = [
  {
    name: "mathsBlock",
    level: "block",
    start: (source) => indexOrNone(source.search(/(?:^|\n) {0,3}(?:\$\$|\\\[)/)),
    tokenizer(source) {
      const found = BLOCK.exec(source);
      if (!found) return undefined;
      return { type: "mathsBlock", raw: found[0], tex: found[1] ?? found[2], display: true };
    },
  },
  {
    name: "maths",
    level: "inline",
    start: (source) => indexOrNone(source.search(/\$|\\[([]/)),
    tokenizer(source) {
      const found = INLINE.exec(source);
      if (!found) return undefined;
      const [raw, double, round, square, single] = found;
      const display = double !== undefined || square !== undefined;
      return { type: "maths", raw, tex: double ?? round ?? square ?? single, display };
    },
  },
];

function indexOrNone(index) {
  return index < 0 ? undefined : index;
}

/** An element for a formula: its source first, and what it looks like once the library is there. */
export function formula(tex, display) {
  const shown = h(display ? "div" : "span", { class: "maths" }, h("code", {}, tex.trim()));
  if (tex.length > LIMIT) return shown;
  if (temml) draw(shown, tex, display);
  else library().then(() => draw(shown, tex, display), () => {});
  return shown;
}

async function library() {
  if (!loading) {
    const href = new URL("../../vendor/Temml-Local.css", import.meta.url).href;
    document.head.append(h("link", { rel: "stylesheet", href }));
    loading = import("../../vendor/temml.min.js");
  }
  temml = (await loading).default;
}

function draw(shown, tex, display) {
  const drawn = document.createElement("span");
  try {
    temml.render(tex, drawn, { displayMode: display, throwOnError: true, trust: false });
  } catch {
    shown.classList.add("unreadable");
    return; // the source stays
  }
  for (const element of drawn.querySelectorAll("[id]")) element.removeAttribute("id");
  shown.replaceChildren(...drawn.childNodes);
}
