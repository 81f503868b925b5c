/** What the page remembers of earlier events: rates, and the last two minutes as lines. */

const KEPT = 120; // events
const RATE_SECONDS = 5;
const HITS_SECONDS = 60;

export class History {
  constructor() {
    this.forget();
  }

  forget() {
    this.samples = []; // { at, stats, keys }
    this.lines = { running: [], waiting: [], generated: [], prompt: [], used: [], first: [], inter: [], hits: [] };
  }

  /** Take an event that has figures of the engine. */
  add(event) {
    const { at, stats, pages } = event.engine;
    const last = this.samples.at(-1);
    // Another engine counts from 0.
    if (last && (stats.steps < last.stats.steps || event.server.epoch !== last.epoch)) this.forget();
    this.samples.push({ at, stats, keys: event.keys, epoch: event.server.epoch });
    if (this.samples.length > KEPT) this.samples.shift();
    const total = pages.free + pages.cached + pages.shared + pages.owned;
    const { lines } = this;
    push(lines.running, stats.running);
    push(lines.waiting, stats.waiting);
    push(lines.generated, this.rate((each) => each.stats.generated_tokens));
    push(lines.prompt, this.rate((each) => each.stats.prompt_tokens - each.stats.cached_tokens));
    push(lines.used, (pages.shared + pages.owned) / total);
    push(lines.first, event.first_token.seconds[0]);
    push(lines.inter, event.inter_token.seconds[0]);
    push(lines.hits, this.hits());
  }

  /** How fast a counter grows, by the events of some seconds; null for the first event. */
  rate(counter, span = RATE_SECONDS) {
    const [before, now] = this._ends(span);
    return now && now.at > before.at ? (counter(now) - counter(before)) / (now.at - before.at) : null;
  }

  /** The tokens a second of an API key. */
  keyRate(name) {
    return this.rate((each) => each.keys[name]?.generated ?? 0);
  }

  /** Of the prompt tokens of the last minute, the share that the prefix cache held. */
  hits() {
    const [before, now] = this._ends(HITS_SECONDS);
    const prompt = now ? now.stats.prompt_tokens - before.stats.prompt_tokens : 0;
    return prompt ? (now.stats.cached_tokens - before.stats.cached_tokens) / prompt : null;
  }

  _ends(span) {
    const now = this.samples.at(-1);
    return [this.samples.find((each) => each.at >= now.at - span - 0.5), now];
  }
}

function push(line, value) {
  line.push(value);
  if (line.length > KEPT) line.shift();
}
