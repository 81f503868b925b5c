/** The server's events, one a second; connects again by itself. */

const FIRST_WAIT = 1000; // milliseconds
const LONGEST_WAIT = 5000;

export class Feed {
  /**
   * base: the URL of the server, with a slash at its end
   * on: { event(fields), status(message), refused(status, message) }
   */
  constructor(base, on) {
    this.url = `${base}dashboard/events`;
    this.engine = 0;
    this.on = on;
    this.key = "";
    this._stop = null;
  }

  get running() {
    return this._stop !== null;
  }

  start() {
    this.stop();
    this._stop = new AbortController();
    this._run(this._stop.signal);
  }

  stop() {
    this._stop?.abort();
    this._stop = null;
  }

  async _run(signal) {
    let wait = FIRST_WAIT;
    while (!signal.aborted) {
      try {
        const answer = await fetch(this.engine ? `${this.url}?engine=${this.engine}` : this.url, {
          headers: this.key ? { authorization: `Bearer ${this.key}` } : {},
          credentials: "same-origin",
          cache: "no-store",
          signal,
        });
        if (answer.status === 401 || answer.status === 403) {
          const message = messageOf(await answer.text());
          if (signal.aborted) return;
          this.stop();
          this.on.refused(answer.status, message);
          return;
        }
        if (answer.ok) {
          for await (const data of eventsOf(answer.body)) {
            wait = FIRST_WAIT;
            if (data !== "[DONE]" && !signal.aborted) this.on.event(JSON.parse(data));
          }
        }
      } catch (error) {
        if (signal.aborted) return;
        if (!(error instanceof TypeError)) throw error;
      }
      if (signal.aborted) return;
      this.on.status("The server does not answer: trying again");
      await new Promise((done) => setTimeout(done, wait));
      wait = Math.min(2 * wait, LONGEST_WAIT);
    }
  }
}

function messageOf(written) {
  try {
    return JSON.parse(written).error.message;
  } catch {
    return "The server refused.";
  }
}

/** The data of each server-sent event. */
async function* eventsOf(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  }
}
