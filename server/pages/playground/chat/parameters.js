/**
 * Every parameter of a request that the settings offer: its name in the API, and a sentence on what
 * it does.  A field that is left empty is not sent, so the model's own default holds.
 */

const number = (name, label, min, max, step, help) =>
  ({ name, label, kind: "number", min, max, step, help });
const integer = (name, label, min, help, max) => ({ name, label, kind: "integer", min, max, help });
const flag = (name, label, help) => ({ name, label, kind: "flag", help });
const choice = (name, label, options, help) => ({ name, label, kind: "choice", options, help });
const text = (name, label, help, placeholder) => ({ name, label, kind: "text", help, placeholder });
const lines = (name, label, help) => ({ name, label, kind: "lines", help });
const ids = (name, label, help) => ({ name, label, kind: "ids", help });
const json = (name, label, help, example) => ({ name, label, kind: "json", help, example });

const EXAMPLE_TOOLS = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "Current weather of a city",
      parameters: {
        type: "object", properties: { city: { type: "string" } }, required: ["city"],
      },
    },
  },
];

export const FORMATS = {
  text: "Text",
  json_object: "JSON object",
  json_schema: "JSON by a schema",
  regex: "Regular expression",
  choice: "One of several texts",
  grammar: "Grammar",
};
export const FORMAT_EXAMPLES = {
  json_schema: JSON.stringify(
    {
      type: "object",
      properties: { name: { type: "string" }, age: { type: "integer" } },
      required: ["name", "age"],
      additionalProperties: false,
    }, null, 2,
  ),
  regex: "(yes|no), because [a-z ]{5,40}\\.",
  choice: "yes\nno",
  grammar: 'start: "yes" | "no"',
};

export const GROUPS = [
  {
    title: "Sampling",
    open: true,
    parameters: [
      number("temperature", "Temperature", 0, 2, 0.1,
        "How much chance decides: 0 always takes the likeliest token, 2 is close to noise."),
      number("top_p", "Top p", 0, 1, 0.05,
        "Keeps the likeliest tokens that together have this probability, and drops the others."),
      integer("top_k", "Top k", -1, "Keeps this many of the likeliest tokens; 0 keeps all."),
      number("min_p", "Min p", 0, 1, 0.01,
        "Drops tokens that are less likely than this share of the likeliest one's probability."),
      integer("seed", "Seed", undefined,
        "The same seed gives the same answer again, whatever else the server does."),
      integer("n", "Answers", 1, "So many answers to each message, side by side.", 8),
    ],
  },
  {
    title: "Length and stopping",
    parameters: [
      integer("max_tokens", "Most tokens", 1,
        "The answer ends after so many tokens; empty: when the context is full."),
      integer("min_tokens", "Fewest tokens", 0, "The answer does not end before so many tokens."),
      lines("stop", "Stop texts", "One a line: the answer ends before the first of them."),
      ids("stop_token_ids", "Stop token ids", "Ids of tokens that end the answer."),
      flag("include_stop_str_in_output", "Show the stop text",
        "The stop text that ended the answer is part of it."),
      flag("ignore_eos", "Ignore the end token",
        "Goes on after the model's own end, up to the most tokens."),
    ],
  },
  {
    title: "Repetition and vocabulary",
    parameters: [
      number("presence_penalty", "Presence penalty", -2, 2, 0.1,
        "Above 0, tokens that the answer has already used become less likely."),
      number("frequency_penalty", "Frequency penalty", -2, 2, 0.1,
        "The same, and more so the more often a token was used."),
      number("repetition_penalty", "Repetition penalty", 0.01, 2, 0.05,
        "Above 1, tokens of the prompt and of the answer become less likely."),
      json("logit_bias", "Logit bias",
        "Token ids with a number from -100 (never) to 100 (always) that is added to their logits.",
        { 42: -100 }),
      lines("bad_words", "Banned words", "One a line: no token may complete one of them."),
      ids("allowed_token_ids", "Allowed token ids", "The answer consists of these tokens only."),
      flag("skip_special_tokens", "Hide special tokens",
        "Leaves tokens such as an end mark out of the text."),
    ],
  },
  {
    title: "Format of the answer",
    parameters: [
      { name: "response_format", label: "Format", kind: "format",
        help: "A grammar enforces it token by token: the answer cannot break it." },
    ],
  },
  {
    title: "Tools",
    parameters: [
      json("tools", "Functions",
        "A JSON array of functions that the model may call; you play the tool and type the result.",
        EXAMPLE_TOOLS),
      text("tool_choice", "Tool choice",
        "auto lets the model decide, none forbids calls, required asks for one; or a function's name.",
        "auto"),
      flag("parallel_tool_calls", "Several calls at once",
        "Whether one answer may have more than one call."),
    ],
  },
  {
    title: "Reasoning",
    parameters: [
      choice("reasoning_effort", "Effort",
        ["none", "minimal", "low", "medium", "high", "xhigh", "max"],
        "How long the model thinks, where its chat template has a switch for it."),
      integer("thinking_token_budget", "Thinking tokens", -1,
        "The reasoning is ended after so many tokens; -1 sets no limit."),
      flag("include_reasoning", "Show the reasoning", "Off: it is computed, but not sent."),
      choice("verbosity", "Verbosity", ["low", "medium", "high"],
        "How long the answer is, where the chat template has a switch for it."),
      json("chat_template_kwargs", "Template variables",
        "Variables of the model's chat template.", { enable_thinking: true }),
    ],
  },
  {
    title: "Insight and scheduling",
    parameters: [
      integer("top_logprobs", "Log-probabilities", 0,
        "Sends each token's log-probability with so many alternatives: see Tokens under an answer.",
        20),
      integer("priority", "Priority", undefined,
        "A request with a lower number runs before others; the default is 0."),
      integer("truncate_prompt_tokens", "Prompt tokens kept", -1,
        "A longer prompt is cut to so many tokens; -1: to what fits."),
      choice("truncation_side", "Cut at", ["left", "right"], "Which end of the prompt is cut off."),
      text("cache_salt", "Cache salt",
        "Requests share cached prefixes only with those of the same salt."),
    ],
  },
];

export const PARAMETERS = GROUPS.flatMap((group) => group.parameters);
const CHOICES = ["auto", "none", "required"];

/** The value that is sent for what was typed; undefined for none.  Throws Error for what is none. */
export function valueOf(parameter, typed) {
  if (typed === undefined || typed === null || typed === "") return undefined;
  switch (parameter.kind) {
    case "number":
    case "integer":
      return inRange(parameter, Number(typed));
    case "flag":
      return typed === "true";
    case "lines": {
      const found = typed.split("\n").filter((line) => line !== "");
      return found.length ? found : undefined;
    }
    case "ids": {
      const found = typed.split(/[\s,]+/).filter(Boolean).map(Number);
      if (!found.every(Number.isInteger)) throw new Error("Type whole numbers with commas between.");
      return found.length ? found : undefined;
    }
    case "json":
      return parsed(typed);
    case "format":
      return formatOf(typed);
    default:
      if (parameter.name !== "tool_choice" || CHOICES.includes(typed)) return typed;
      return { type: "function", function: { name: typed } };
  }
}

function inRange({ kind, min, max }, value) {
  if (!Number.isFinite(value)) throw new Error("Type a number.");
  if (kind === "integer" && !Number.isSafeInteger(value)) throw new Error("Type a whole number.");
  if (value < (min ?? -Infinity)) throw new Error(`It has to be at least ${min}.`);
  if (value > (max ?? Infinity)) throw new Error(`It can be at most ${max}.`);
  return value;
}

function parsed(typed) {
  try {
    return JSON.parse(typed);
  } catch (error) {
    throw new Error(`This is no JSON: ${error.message}`);
  }
}

/** {field of the request: value} for {kind, text}. */
function formatOf({ kind, text: written }) {
  switch (kind) {
    case "json_object":
      return { response_format: { type: "json_object" } };
    case "json_schema": {
      const schema = parsed(written || "{}");
      const named = { name: "answer", strict: true, schema };
      return { response_format: { type: "json_schema", json_schema: named } };
    }
    case "regex":
    case "grammar":
      if (!written) throw new Error("Type one.");
      return { structured_outputs: { [kind]: written } };
    case "choice": {
      const options = (written ?? "").split("\n").filter((line) => line !== "");
      if (!options.length) throw new Error("Type the texts, one a line.");
      return { structured_outputs: { choice: options } };
    }
    default:
      return undefined;
  }
}
