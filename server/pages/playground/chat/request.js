/** Bodies of POST /v1/chat/completions, and the same as commands to copy. */

import { PARAMETERS, valueOf } from "./parameters.js";

/** A setting: `id` names it in the answers that it has made. */
export function newLane(model) {
  return { id: 0, model, system: "", values: {} };
}

/** [{parameter, message}] for what cannot be sent. */
export function problemsOf(lane) {
  const problems = [];
  for (const parameter of PARAMETERS) {
    try {
      valueOf(parameter, lane.values[parameter.name]);
    } catch (error) {
      problems.push({ parameter, message: error.message });
    }
  }
  return problems;
}

/** The body of a request with these settings.  Throws Error for a value that cannot be sent. */
export function bodyOf(lane, messages) {
  const body = { model: lane.model, messages };
  for (const parameter of PARAMETERS) {
    const value = valueOf(parameter, lane.values[parameter.name]);
    if (value === undefined) continue;
    if (parameter.kind === "format") Object.assign(body, value);
    else body[parameter.name] = value;
  }
  if (body.top_logprobs !== undefined) body.logprobs = true;
  if (!body.tools) {
    delete body.tool_choice;
    delete body.parallel_tool_calls;
  }
  if (body.truncate_prompt_tokens === undefined) delete body.truncation_side;
  return body;
}

/** What the page adds to follow an answer: it changes no token. */
export function streamed(body) {
  const options = { include_usage: true, continuous_usage_stats: true };
  return { ...body, stream: true, stream_options: options, timings: true };
}

// What OpenAI's client for Python takes as arguments of its own.
const OPENAI_FIELDS = new Set([
  "model", "messages", "temperature", "top_p", "n", "seed", "stop", "presence_penalty",
  "frequency_penalty", "logit_bias", "max_tokens", "logprobs", "top_logprobs", "response_format",
  "tools", "tool_choice", "parallel_tool_calls", "reasoning_effort", "verbosity",
]);

export const SNIPPETS = { curl: asCurl, Python: asPython, JavaScript: asJavaScript };

function asCurl(base, body, hasKey) {
  const key = hasKey ? ' \\\n  -H "authorization: Bearer $WAVEFILL_API_KEY"' : "";
  const data = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  const kind = "-H 'content-type: application/json'";
  return `curl ${base}v1/chat/completions${key} \\\n  ${kind} \\\n  -d '${data}'\n`;
}

function asPython(base, body, hasKey) {
  const key = hasKey ? 'os.environ["WAVEFILL_API_KEY"]' : '"none"';
  const own = Object.entries(body).filter(([name]) => OPENAI_FIELDS.has(name));
  const extra = Object.entries(body).filter(([name]) => !OPENAI_FIELDS.has(name));
  const fields = own.map(([name, value]) => `    ${name}=${python(value, 1)},\n`);
  if (extra.length) fields.push(`    extra_body=${python(Object.fromEntries(extra), 1)},\n`);
  return (
    `${hasKey ? "import os\n\n" : ""}from openai import OpenAI\n\n` +
    `client = OpenAI(base_url="${base}v1", api_key=${key})\n` +
    `answer = client.chat.completions.create(\n${fields.join("")})\n` +
    "print(answer.choices[0].message)\n"
  );
}

function asJavaScript(base, body, hasKey) {
  const key = hasKey ? "\n    authorization: `Bearer ${process.env.WAVEFILL_API_KEY}`," : "";
  const data = JSON.stringify(body, null, 2).replaceAll("\n", "\n  ");
  return (
    `const answer = await fetch("${base}v1/chat/completions", {\n  method: "POST",\n` +
    `  headers: {${key}\n    "content-type": "application/json",\n  },\n` +
    `  body: JSON.stringify(${data}),\n});\n` +
    "const { choices } = await answer.json();\nconsole.log(choices[0].message);\n"
  );
}

/** A JSON value as Python writes it. */
function python(value, depth) {
  const pad = "    ".repeat(depth + 1);
  const end = "    ".repeat(depth);
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) {
    if (!value.length) return "[]";
    return `[\n${value.map((item) => `${pad}${python(item, depth + 1)},\n`).join("")}${end}]`;
  }
  if (typeof value === "object") {
    const items = Object.entries(value);
    if (!items.length) return "{}";
    const rows = items.map(([key, item]) => `${pad}${quoted(key)}: ${python(item, depth + 1)},\n`);
    return `{\n${rows.join("")}${end}}`;
  }
  return typeof value === "string" ? quoted(value) : String(value);
}

/** JSON's escapes are Python's, too, except for pairs of surrogates, which JSON.stringify keeps. */
function quoted(text) {
  return JSON.stringify(text);
}
