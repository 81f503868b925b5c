/** Chunks of a stream into the entries of an answer. */

/** entries: one for each of the `n` choices; began: performance.now() when the request was sent */
export function applyChunk(entries, chunk, began) {
  const seconds = (performance.now() - began) / 1000;
  for (const choice of chunk.choices) {
    const entry = entries[choice.index];
    if (!entry) continue;
    addDelta(entry, choice.delta, seconds);
    for (const token of choice.logprobs?.content ?? []) {
      const top = token.top_logprobs.map((other) => [other.token, other.logprob]);
      entry.logprobs.push([token.token, token.logprob, top]);
    }
    if (choice.finish_reason) {
      Object.assign(entry, { finish: choice.finish_reason, state: "done", seconds });
      entry.timings = choice.timings ?? null;
      entry.tokens = choice.timings?.completion_tokens ?? entry.tokens;
    }
  }
  if (chunk.usage) addUsage(entries, chunk.usage);
}

function addDelta(entry, delta, seconds) {
  const written = delta.content || delta.reasoning_content || delta.tool_calls;
  if (written && entry.firstSeconds === null) entry.firstSeconds = seconds;
  entry.content += delta.content ?? "";
  entry.reasoning += delta.reasoning_content ?? "";
  for (const part of delta.tool_calls ?? []) {
    const call = (entry.calls[part.index] ??= { id: "", name: "", arguments: "" });
    call.id ||= part.id ?? "";
    call.name ||= part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
  entry.seconds = seconds;
}

/** The usage is that of all choices together; what is generated is told apart at their ends. */
function addUsage(entries, usage) {
  for (const entry of entries) {
    entry.promptTokens = usage.prompt_tokens;
    entry.cachedTokens = usage.prompt_tokens_details?.cached_tokens ?? 0;
    if (entries.length === 1) entry.tokens = usage.completion_tokens;
  }
}

/** Tokens a second while it was generated: as the server timed it, else as they arrived here. */
export function speedOf(entry) {
  const seconds = entry.timings?.decode_seconds ?? entry.seconds - entry.firstSeconds;
  return entry.tokens > 1 && seconds > 0 ? (entry.tokens - 1) / seconds : null;
}
