/** The server's API, with the key and with errors that say what the server said. */

export class ApiError extends Error {
  /** status: of HTTP; 0 if there was no answer */
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export class Api {
  /** base: the URL of the server, with a slash at its end */
  constructor(base) {
    this.base = base;
    this.key = "";
  }

  async models() {
    const answer = await this._fetch("v1/models", {});
    return (await answer.json()).data;
  }

  /** Null if requests are answered, else what the server says instead. */
  async problem() {
    try {
      await this._fetch("health", {});
      return null;
    } catch (error) {
      return error;
    }
  }

  /** Call onChunk with every chunk of a streamed chat completion. */
  async stream(body, signal, onChunk) {
    const answer = await this._fetch("v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(body),
      signal,
    });
    try {
      for await (const data of eventsOf(answer.body)) {
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ApiError(chunk.error.message, answer.status);
        onChunk(chunk);
      }
    } catch (error) {
      throw error instanceof TypeError ? lost(error) : error;
    }
    throw lost(new Error("the answer broke off"));
  }

  async _fetch(path, options) {
    const headers = { ...options.headers };
    if (this.key) headers.authorization = `Bearer ${this.key}`;
    let answer;
    try {
      answer = await fetch(this.base + path, { ...options, headers, credentials: "same-origin" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw lost(error);
    }
    if (answer.ok) return answer;
    const written = await answer.text();
    throw new ApiError(messageOf(written) ?? `The server answered ${answer.status}.`, answer.status);
  }
}

function lost(error) {
  return new ApiError(`The connection to the server was lost (${error.message}).`, 0);
}

function messageOf(written) {
  try {
    return JSON.parse(written).error.message;
  } catch {
    return null;
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
