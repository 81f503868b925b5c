/** The calls that an answer makes, and the form that answers them. */

import { codeBlock } from "../text/markdown.js";
import { button, grow, h, uniqueId } from "./dom.js";

/** Arguments as JSON with indents; as they are while they are not whole. */
export function pretty(written) {
  try {
    return JSON.stringify(JSON.parse(written), null, 2);
  } catch {
    return written;
  }
}

export function callView(call) {
  return h("div", { class: "call" },
    h("p", { class: "call-name" }, "calls ", h("code", {}, call.name)),
    codeBlock(pretty(call.arguments), "arguments"));
}

/** A form for the results of these calls; its `results()` are {call's id: text}. */
export function resultForm(calls, submit) {
  const fields = calls.map((call) => {
    const id = uniqueId("result");
    const field = h("textarea", {
      id, rows: "2", spellcheck: "false", oninput: () => grow(field),
      placeholder: '{"temperature": 21, "condition": "sunny"}',
    });
    return { call, field, label: h("label", { for: id }, "Result of ", h("code", {}, call.name)) };
  });
  const form = h("div", { class: "result-form", role: "group", "aria-label": "Results of the tools",
    onkeydown: (event) => {
      if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
      event.preventDefault();
      submit();
    } },
    fields.map(({ label, field }) => [label, field]),
    button("Send the results", submit, { class: "primary" }));
  form.results = () => Object.fromEntries(fields.map(({ call, field }) => [call.id, field.value]));
  return form;
}

export function resultsView(node) {
  const rows = Object.values(node.results).flatMap((given) => Object.values(given));
  return rows.map((text) => codeBlock(pretty(text) || "(empty)", "result"));
}
