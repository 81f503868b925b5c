/** A text that is being changed, with what keeps it and what gives it up. */

import { button, grow, h } from "./dom.js";

/** done gets the text, or null if it stays as it was, and says whether it was taken. */
export function editor(text, label, done) {
  const field = h("textarea", { value: text, "aria-label": "Text to change", rows: "2",
    oninput: () => grow(field) });
  const finish = () => done(field.value);
  const element = h("div", { class: "editor", onkeydown: (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      done(null);
    }
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      finish();
    }
  } },
    field,
    h("div", { class: "actions" },
      button(label, finish, { class: "primary" }),
      button("Cancel", () => done(null))));
  element.focusText = () => {
    grow(field);
    field.focus();
  };
  return element;
}
