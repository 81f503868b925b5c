/** The last steps: how long they took, and what the scheduler's model of a step's time says. */

import { h } from "../../playground/view/dom.js";
import { plural, seconds, sum } from "../numbers.js";
import { colour, context } from "./canvas.js";

// In the order of the server's weights; the first is of each step, the others of its load.
const PARTS = ["each step", "decode rows", "prompt tokens", "KV read", "attention in prompts", "images"];
const HEIGHT = 150;
const LEFT = 56; // of the scale

export class Steps {
  constructor(place, lead) {
    this.lead = lead;
    this.canvas = h("canvas", { role: "img", "aria-label": "Times of the last steps" });
    place.append(
      h("div", {}, this.canvas),
      h("ul", { class: "legend" },
        h("li", {}, h("i", { class: "swatch measured" }), " measured"),
        PARTS.map((name, part) => h("li", {}, h("i", { class: `swatch part${part}` }), ` ${name}`))),
    );
  }

  show(event) {
    const { steps, weights } = event.engine;
    const parts = steps.map((step) => weights.length ? predictedParts(step, weights) : []);
    const last = steps.at(-1);
    if (!last) {
      this.lead.textContent = "No step yet.";
      return;
    }
    const load = [plural(last.rows, "decode row")];
    if (last.prompt_tokens) load.push(plural(last.prompt_tokens, "prompt token"));
    if (last.encoder_stages) load.push(`${plural(last.encoder_stages, "stage")} of the image encoder`);
    const predicted = weights.length ? `, predicted ${seconds(sum(parts.at(-1)))}` : ", not predicted before the first prompt";
    this.lead.textContent = `Last step: ${seconds(last.seconds)}${predicted} (${load.join(", ")})`;
    this.canvas.setAttribute("aria-label", `Times of the last ${steps.length} steps. ${this.lead.textContent}`);
    this._draw(steps, parts);
  }

  _draw(steps, parts) {
    const { pen, width, height } = context(this.canvas, HEIGHT);
    const longest = Math.max(...steps.map((step) => step.seconds), ...parts.map(sum));
    const top = nice(longest);
    const [base, scale] = [height - 4, (height - 14) / top];
    const step = (width - LEFT) / Math.max(steps.length, 24);
    pen.font = "11px system-ui, sans-serif";
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (const share of [0, 0.5, 1]) {
      const y = base - share * top * scale;
      pen.fillStyle = colour("--line");
      pen.fillRect(LEFT, y, width - LEFT, 1);
      pen.fillStyle = colour("--quiet");
      if (share) pen.fillText(seconds(share * top), LEFT - 6, y);
    }
    steps.forEach((each, place) => {
      const x = LEFT + place * step + 1;
      const wide = Math.max(step - 2, 1);
      let done = 0;
      parts[place].forEach((part, kind) => {
        pen.fillStyle = colour(`--part${kind}`);
        pen.fillRect(x, base - (done + part) * scale, wide, part * scale);
        done += part;
      });
      pen.fillStyle = colour("--text");
      pen.fillRect(x - 0.5, base - each.seconds * scale - 1, wide + 1, 2.5);
    });
  }
}

/** Seconds of each of PARTS; the encoder's stages and operations, and steps with images, are one. */
function predictedParts(step, weights) {
  const load = [1, step.rows, step.prompt_tokens, step.kv_tokens, step.pairs,
    step.encoder_stages, step.encoder_operations, step.has_images];
  const times = weights.map((weight, place) => weight * load[place]);
  return [...times.slice(0, 5), sum(times.slice(5))];
}

/** A round number not below the value. */
function nice(value) {
  const unit = 10 ** Math.floor(Math.log10(value || 1));
  return [1, 2, 3, 4, 5, 6, 8, 10].map((each) => each * unit).find((each) => each >= value * 0.999);
}
