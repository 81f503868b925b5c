/** An answer as its tokens: how likely each was, and what else could have stood there. */

import { h } from "./dom.js";

const share = (logprob) => Math.exp(logprob);
const percent = (value) => (value >= 0.0995 ? `${Math.round(value * 100)} %`
  : value >= 0.0005 ? `${(value * 100).toFixed(1)} %` : "< 0.1 %");

/** Spaces and line ends as signs, since they are tokens, too. */
function visible(token) {
  return token.replaceAll("\n", "↵").replaceAll("\t", "⇥").replace(/^ +| +$/g, (spaces) =>
    "·".repeat(spaces.length)) || "(empty)";
}

function likelihood(value) {
  return value >= 0.9 ? "sure" : value >= 0.5 ? "likely" : value >= 0.2 ? "open" : "unlikely";
}

/** Elements for [token, logprob, [[token, logprob], ...]]; hover, focus and arrow keys explain one. */
export function tokenView(logprobs) {
  const bubble = h("div", { class: "bubble", role: "tooltip", id: "token-bubble", hidden: true });
  const tokens = logprobs.map(([token, logprob], place) =>
    h("span", {
      class: `token ${likelihood(share(logprob))}`,
      tabindex: place === 0 ? "0" : "-1",
      "data-place": String(place),
      "aria-describedby": "token-bubble",
    }, token.replaceAll("\n", "↵\n")));
  const view = h("div", { class: "tokens", role: "group", "aria-label":
    "Tokens of the answer: the arrow keys go from one to the next" }, tokens);

  const show = (event) => {
    const place = event.target.dataset?.place;
    if (place === undefined) return;
    explain(bubble, logprobs[place]);
    bubble.hidden = false;
    put(bubble, event.target);
  };
  const hide = () => (bubble.hidden = true);
  view.addEventListener("mouseover", show);
  view.addEventListener("focusin", show);
  view.addEventListener("mouseleave", hide);
  view.addEventListener("focusout", hide);
  view.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const next = tokens[Number(event.target.dataset.place) + step];
    if (!step || !next) return;
    event.preventDefault();
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
  return h("div", { class: "token-view" }, view, bubble);
}

function explain(bubble, [token, logprob, top]) {
  const rows = top.some(([other]) => other === token) ? top : [[token, logprob], ...top];
  const lines = rows.map(([other, value]) => {
    const bar = h("span", { class: "bar" });
    bar.style.width = `${Math.max(1, share(value) * 100)}%`;
    return h("tr", { class: other === token ? "chosen" : null },
      h("td", {}, h("code", {}, visible(other))),
      h("td", { class: "number" }, percent(share(value))),
      h("td", { class: "bars", "aria-hidden": "true" }, bar));
  });
  bubble.replaceChildren(
    h("table", {}, h("tbody", {}, lines)),
    h("p", {}, `log-probability ${Number(logprob.toPrecision(3))}`),
  );
}

/** Below the token, within the window. */
function put(bubble, token) {
  const at = token.getClientRects()[0] ?? token.getBoundingClientRect();
  const width = bubble.offsetWidth;
  const below = at.bottom + bubble.offsetHeight + 8 < innerHeight;
  bubble.style.left = `${Math.max(8, Math.min(at.left, innerWidth - width - 8))}px`;
  bubble.style.top = `${below ? at.bottom + 4 : at.top - bubble.offsetHeight - 4}px`;
}
