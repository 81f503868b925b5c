/** What became of a request, in seconds since it arrived. */

import { plural, seconds } from "../numbers.js";

/**
 * Its phases: { kind, from, to, tokens }; kinds are queue, chunk, decode and preempted.
 * live: its sequence in the engine, if there is one; now: the server's clock
 */
export function phasesOf(request, live, now) {
  const end = (request.ended || now) - request.arrived;
  const first = request.first_token ? request.first_token - request.arrived : null;
  const events = (live?.events ?? request.events).map(([at, tokens]) => ({ at: at - request.arrived, tokens }));
  const started = request.started ? request.started - request.arrived : events[0]?.at ?? null;
  if (started === null || started > end) return [{ kind: "queue", from: 0, to: end }];
  const phases = [{ kind: "queue", from: 0, to: started }];
  if (!events.length) {
    phases.push({ kind: "chunk", from: started, to: first ?? end, tokens: 0 });
    if (first !== null) phases.push({ kind: "decode", from: first, to: end });
    return phases;
  }
  // The chunks of a prompt follow one another; the last one ends with the token after it.
  let decodes = null;
  events.forEach(({ at, tokens }, place) => {
    const next = events[place + 1];
    if (decodes !== null && at > decodes) phases.push({ kind: "decode", from: decodes, to: at });
    decodes = null;
    if (tokens === 0) {
      phases.push({ kind: "preempted", from: at, to: next?.at ?? end });
      return;
    }
    const last = !next || next.tokens === 0;
    let to = next?.at ?? end;
    if (last && first !== null) {
      // After a preemption the end of the last chunk is not known: decoding goes on about then.
      to = first > at ? Math.min(first, to) : at;
      decodes = to;
    }
    phases.push({ kind: "chunk", from: at, to, tokens });
  });
  if (decodes !== null && decodes < end) phases.push({ kind: "decode", from: decodes, to: end });
  return phases;
}

const WORDS = { queue: "waited", chunk: "prefilled", decode: "decoded", preempted: "was preempted for" };

export function describe(phases) {
  const chunks = phases.filter((each) => each.kind === "chunk");
  const total = (kind) => phases.filter((each) => each.kind === kind).reduce((sum, each) => sum + each.to - each.from, 0);
  return ["queue", "chunk", "decode", "preempted"]
    .filter((kind) => phases.some((each) => each.kind === kind))
    .map((kind) => {
      const sizes = chunks.map((each) => each.tokens).filter(Boolean);
      const inChunks = kind === "chunk" && sizes.length ? ` in ${plural(sizes.length, "chunk")} of ${sizes.join(", ")} tokens` : "";
      return `${WORDS[kind]} ${seconds(total(kind))}${inChunks}`;
    })
    .join("; ");
}
