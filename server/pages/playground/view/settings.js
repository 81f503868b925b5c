/** The settings: one tab for each of up to four, and in it a field for each parameter. */

import { FORMATS, FORMAT_EXAMPLES, GROUPS, valueOf } from "../chat/parameters.js";
import { button, grow, h, uniqueId } from "./dom.js";

const MOST = 4;
const LETTERS = "ABCD";

export class Settings {
  constructor(playground, element) {
    Object.assign(this, { playground, element });
    this.lane = 0;
    this._open = new Set(GROUPS.filter((group) => group.open).map((group) => group.title));
  }

  /** Draw all anew: another conversation, other models, another tab. */
  show() {
    const { lanes } = this.playground.conversation;
    this.lane = Math.min(this.lane, lanes.length - 1);
    const lane = lanes[this.lane];
    this.fields = new Map();
    this.element.replaceChildren(
      this._tabs(lanes),
      h("div", { class: "lane", role: "tabpanel", id: "lane", "aria-label": `Setting ${LETTERS[lane.id]}` },
        this._model(lane), this._system(lane), GROUPS.map((group) => this._group(group, lane)),
        button("Reset these settings", () => {
          lane.values = {};
          this._changed();
          this.show();
        })));
    for (const field of this.element.querySelectorAll("textarea")) if (field.value) grow(field);
  }

  /** Go to the field of a parameter that cannot be sent. */
  reveal(lane, parameter) {
    this.lane = lane;
    this._open.add(GROUPS.find((group) => group.parameters.includes(parameter)).title);
    this.show();
    this.fields.get(parameter.name)?.focus();
  }

  _changed() {
    this.playground.settingsChanged();
  }

  _tabs(lanes) {
    const choose = (index) => {
      this.lane = index;
      this.show();
      const chosen = this.element.querySelector('[aria-selected="true"]');
      (chosen ?? this.element.querySelector("button")).focus();
    };
    const tabs = lanes.map(({ id }, index) =>
      button(LETTERS[id], () => choose(index), {
        role: "tab", "aria-selected": String(index === this.lane), "aria-controls": "lane",
        "aria-label": `Setting ${LETTERS[id]}`, tabindex: index === this.lane ? "0" : "-1",
      }));
    const list = h("div", { role: "tablist", "aria-label": "Settings, answered side by side",
      onkeydown: (event) => {
        const next = this.lane + ({ ArrowRight: 1, ArrowLeft: -1 }[event.key] ?? NaN);
        if (lanes[next]) choose(next);
      } }, tabs);
    const label = lanes.length > 1 ? "Add" : "Compare with another setting";
    const add = lanes.length < MOST && button(label, () => {
      const id = [0, 1, 2, 3].find((each) => !lanes.some((lane) => lane.id === each));
      lanes.push({ ...structuredClone(lanes[this.lane]), id });
      this._changed();
      choose(lanes.length - 1);
    }, { title: "Another setting, or another model, that answers the same messages beside this one" });
    const remove = lanes.length > 1 && button("Remove", () => {
      lanes.splice(this.lane, 1);
      this._changed();
      choose(Math.max(0, this.lane - 1));
    }, { "aria-label": `Remove setting ${LETTERS[lanes[this.lane].id]}` });
    return h("div", { class: "tabs" }, lanes.length > 1 && list, add, remove);
  }

  _model(lane) {
    const { models } = this.playground;
    const id = uniqueId("model");
    const options = models.map((model) =>
      h("option", { value: model.id, selected: model.id === lane.model }, model.id));
    const context = models.find((model) => model.id === lane.model)?.context;
    const help = h("p", { class: "help", id: `${id}-help` },
      context ? `Reads and writes up to ${context} tokens.` : "");
    const field = h("select", { id, "aria-describedby": `${id}-help`, onchange: () => {
      lane.model = field.value;
      this._changed();
      this.show();
    } }, options);
    return h("div", { class: "field" }, h("label", { for: id }, "Model"), field, help);
  }

  _system(lane) {
    const id = uniqueId("system");
    const field = h("textarea", { id, rows: "3", value: lane.system, "aria-describedby": `${id}-help`,
      oninput: () => {
        lane.system = field.value;
        grow(field);
        this._changed();
      } });
    return h("div", { class: "field" }, h("label", { for: id }, "System prompt"), field,
      h("p", { class: "help", id: `${id}-help` }, "Stands before all messages: who the model is, how it answers."));
  }

  _group(group, lane) {
    const set = group.parameters.filter((parameter) => isSet(lane.values[parameter.name])).length;
    const count = h("span", { class: "count" }, set ? `${set} set` : "");
    const recount = () => {
      const now = group.parameters.filter((parameter) => isSet(lane.values[parameter.name])).length;
      count.textContent = now ? `${now} set` : "";
    };
    const details = h("details", { open: this._open.has(group.title), ontoggle: () => {
      if (details.open) this._open.add(group.title);
      else this._open.delete(group.title);
    } },
      h("summary", {}, group.title, " ", count),
      group.parameters.map((parameter) => this._field(parameter, lane, recount)));
    return details;
  }

  _field(parameter, lane, changed) {
    const id = uniqueId("parameter");
    const help = h("p", { class: "help", id: `${id}-help` }, parameter.help);
    const error = h("p", { class: "error", id: `${id}-error` });
    const describe = { id, "aria-describedby": `${id}-help ${id}-error`, name: parameter.name };
    const take = (value) => {
      if (isSet(value)) lane.values[parameter.name] = value;
      else delete lane.values[parameter.name];
      check();
      changed();
      this._changed();
    };
    const check = () => {
      error.textContent = "";
      try {
        valueOf(parameter, lane.values[parameter.name]);
      } catch (problem) {
        error.textContent = problem.message;
      }
      input.setAttribute("aria-invalid", String(error.textContent !== ""));
    };
    const [input, ...rest] = inputFor(parameter, lane.values[parameter.name], describe, take);
    this.fields.set(parameter.name, input);
    check();
    const short = ["number", "integer", "flag", "choice"].includes(parameter.kind);
    return h("div", { class: short ? "field short" : "field" },
      h("label", { for: id }, parameter.label, " ", h("code", {}, parameter.name)), input, rest, help, error);
  }
}

function isSet(value) {
  return value !== undefined && value !== "" && value?.kind !== "text";
}

/** The field of a parameter, and what stands below it; take gets what is typed. */
function inputFor(parameter, value, attributes, take) {
  const { kind, min, max, step, options, example, placeholder } = parameter;
  const change = (event) => take(event.target.value);
  if (kind === "number" || kind === "integer") {
    return [h("input", { ...attributes, type: "number", min, max, step: step ?? 1, value: value ?? "",
      placeholder: "default", inputmode: kind === "integer" ? "numeric" : "decimal", oninput: change })];
  }
  if (kind === "flag" || kind === "choice") {
    const named = kind === "flag" ? { true: "on", false: "off" }
      : Object.fromEntries(options.map((option) => [option, option]));
    return [select(attributes, { "": "default", ...named }, value ?? "", take)];
  }
  if (kind === "format") return formatFields(value ?? { kind: "text", text: "" }, attributes, take);
  if (kind === "text") {
    return [h("input", { ...attributes, type: "text", value: value ?? "", placeholder, oninput: change })];
  }
  const area = h("textarea", { ...attributes, rows: kind === "json" ? "3" : "2", value: value ?? "",
    spellcheck: "false", class: "mono", oninput: (event) => {
      grow(area);
      change(event);
    } });
  const fillIn = example && button("Use an example", () => {
    area.value = JSON.stringify(example, null, 2);
    grow(area);
    take(area.value);
  }, { class: "quiet" });
  return [area, fillIn];
}

function select(attributes, named, value, take) {
  return h("select", { ...attributes, onchange: (event) => take(event.target.value) },
    Object.entries(named).map(([key, label]) =>
      h("option", { value: key, selected: key === value }, label)));
}

function formatFields(value, attributes, take) {
  let current = value;
  const written = h("textarea", { rows: "3", class: "mono", spellcheck: "false", value: value.text ?? "",
    "aria-label": "The schema, expression, texts or grammar", oninput: () => {
      current = { ...current, text: written.value };
      grow(written);
      take(current);
    } });
  const show = () => (written.hidden = !(current.kind in FORMAT_EXAMPLES));
  const choose = (kind) => {
    const example = FORMAT_EXAMPLES[kind] ?? "";
    current = { kind, text: example };
    written.value = example;
    show();
    grow(written);
    take(current);
  };
  show();
  return [select(attributes, FORMATS, value.kind, choose), written];
}

