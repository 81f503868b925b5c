/** What each program reads in the split plan, beside FlashAttention-3's rule. */

import { h } from "../../playground/view/dom.js";
import { number, plural, seconds } from "../numbers.js";
import { colour, context, sequenceColour } from "./canvas.js";

const EIGHTHS = 8; // of a block, the unit of the server's figures
const HEIGHT = 128;
const NAMES = { fa3: "FlashAttention-3's rule" };

export class Waves {
  constructor(place, lead) {
    this.lead = lead;
    this.charts = ["plan", "fa3"].map((name) => {
      const chart = {
        name,
        title: h("h3"),
        note: h("p", { class: "note" }),
        canvas: h("canvas", { role: "img" }),
      };
      place.append(h("div", { class: "wave" }, h("div", { class: "wave-head" }, chart.title, chart.note), h("div", {}, chart.canvas)));
      return chart;
    });
    place.append(h("p", { class: "help" },
      "A column is a program, coloured by the sequence whose KV it reads; its height is the time it takes. " +
      "No plan ends below the dashed line. Simulated, with all programs equally fast."));
    this.place = place;
    place.hidden = true;
  }

  show(event, focus) {
    const { wave } = event.engine;
    this.place.hidden = wave === null;
    if (wave === null) {
      this.lead.textContent = event.engine.stats.running ? "No sequence decodes at this moment." : "No sequence decodes.";
      return;
    }
    const { plan, fa3 } = wave;
    const heads = `${plural(wave.rows.length, "row")}, ${number(wave.kv_tokens.reduce((a, b) => a + b, 0))} tokens of KV`;
    const where = wave.runs_here ? wave.device : `the plan that an ${wave.device.split(" ").slice(0, 2).join(" ")} would get`;
    this.lead.textContent = `${heads}; ${where}: ${plural(wave.sms, "SM")}, ${plural(wave.programs, "program")}`;
    const top = Math.max(plan.makespan, fa3.makespan, 1);
    for (const chart of this.charts) this._chart(chart, wave, top, focus);
  }

  _chart(chart, wave, top, focus) {
    const plan = wave[chart.name];
    const name = NAMES[chart.name] ?? `This plan (${plan.planner})`;
    const time = plan.makespan * wave.block_us * 1e-6;
    const busy = plan.programs.reduce((total, loads) => total + loadOf(loads), 0) / (plan.makespan * wave.programs || 1);
    chart.title.textContent = name;
    chart.note.replaceChildren(
      h("b", {}, `${number(plan.makespan)} blocks`), ` · ${seconds(time)} · ${Math.round(busy * 100)} % busy`);
    chart.canvas.setAttribute("aria-label",
      `${name}: the last program ends after ${number(plan.makespan)} blocks, the bound is ${number(wave.lower_bound)}`);
    const { pen, width, height } = context(chart.canvas, HEIGHT);
    const [base, scale, step] = [height - 1, (height - 6) / top, width / plan.programs.length];
    const wide = Math.max(step - (step > 3 ? 1 : 0.25), 0.5);
    plan.programs.forEach((loads, program) => {
      let done = 0;
      for (let place = 0; place < loads.length; place += 2) {
        const [id, cost] = [wave.rows[loads[place]], loads[place + 1] / EIGHTHS];
        pen.fillStyle = sequenceColour(id, focus && focus !== id);
        pen.fillRect(program * step, base - (done + cost) * scale, wide, Math.max(cost * scale - 0.75, 0.5));
        done += cost;
      }
    });
    pen.fillStyle = colour("--line");
    pen.fillRect(0, base, width, 1);
    pen.strokeStyle = colour("--quiet");
    pen.setLineDash([4, 4]);
    pen.beginPath();
    pen.moveTo(0, base - wave.lower_bound * scale);
    pen.lineTo(width, base - wave.lower_bound * scale);
    pen.stroke();
    pen.setLineDash([]);
  }
}

function loadOf(loads) {
  let total = 0;
  for (let place = 1; place < loads.length; place += 2) total += loads[place];
  return total / EIGHTHS;
}
