/** Elements without markup: no text is ever parsed as HTML. */

/**
 * An element with attributes, listeners (`onclick`) and children; children that are null or false are
 * left out, strings become text.
 */
export function h(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(key.slice(2), value);
    else if (key === "value" || key === "checked") element[key] = value;
    else element.setAttribute(key, value === true ? "" : value);
  }
  append(element, children);
  return element;
}

export function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
}

/** Replace all children, unless they are the same ones. */
export function fill(element, ...children) {
  const wanted = children.flat(Infinity).filter(Boolean);
  const same =
    wanted.length === element.childNodes.length &&
    wanted.every((child, place) => element.childNodes[place] === child);
  if (!same) element.replaceChildren(...wanted);
}

export function button(label, onclick, attributes = {}) {
  return h("button", { type: "button", onclick, ...attributes }, label);
}

/** A button that copies text() and says so. */
export function copyButton(label, text, attributes = {}) {
  const copy = button(label, async () => {
    const copied = await copyText(text());
    copy.textContent = copied ? "Copied" : "Not copied";
    setTimeout(() => (copy.textContent = label), 1500);
  }, attributes);
  return copy;
}

/** Plain HTTP has no clipboard object in browsers: there, a selection is copied. */
export async function copyText(text) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      // The page has no leave to write: try the selection.
    }
  }
  const field = h("textarea", { value: text, class: "offscreen" });
  const focused = document.activeElement;
  (document.querySelector("dialog[open]") ?? document.body).append(field);
  field.select();
  const copied = document.execCommand("copy");
  field.remove();
  focused?.focus();
  return copied;
}

/** A textarea as high as its text. */
export function grow(field) {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + 2}px`;
}

let last = 0;

export function uniqueId(prefix) {
  last += 1;
  return `${prefix}-${last}`;
}
