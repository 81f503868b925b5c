/** Conversations in the browser: IndexedDB, or memory alone where there is none. */

import { ROOT, addNode, newConversation, newEntry, titleOf } from "./tree.js";
import { newLane } from "./request.js";

const FORMAT = "wavefill-conversations";
const STORES = ["conversations", "summaries"];

export class Storage {
  constructor() {
    this._database = null;
    this._memory = new Map();
  }

  /** Whether conversations outlive the page. */
  async open() {
    try {
      const request = indexedDB.open("wavefill", 1);
      request.onupgradeneeded = () => {
        for (const name of STORES) request.result.createObjectStore(name, { keyPath: "id" });
      };
      this._database = await settled(request);
    } catch {
      this._database = null;
    }
    return this._database !== null;
  }

  /** [{id, title, updated}], the last one first. */
  async list() {
    const all = this._database
      ? await settled(this._store("summaries", "readonly").getAll())
      : [...this._memory.values()].map(summaryOf);
    return all.sort((a, b) => b.updated - a.updated);
  }

  async get(id) {
    if (!this._database) return this._memory.get(id);
    return settled(this._store("conversations", "readonly").get(id));
  }

  async put(conversation) {
    if (!this._database) return void this._memory.set(conversation.id, conversation);
    const both = this._database.transaction(STORES, "readwrite");
    both.objectStore("conversations").put(conversation);
    both.objectStore("summaries").put(summaryOf(conversation));
    await finished(both);
  }

  async remove(id) {
    if (!this._database) return void this._memory.delete(id);
    const both = this._database.transaction(STORES, "readwrite");
    for (const name of STORES) both.objectStore(name).delete(id);
    await finished(both);
  }

  /** The text of a file that has these conversations, all by default. */
  async exported(ids) {
    const wanted = ids ?? (await this.list()).map((summary) => summary.id);
    const conversations = await Promise.all(wanted.map((id) => this.get(id)));
    return JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 1);
  }

  /** Add the conversations of an exported file as new ones; their ids.  Throws Error. */
  async imported(written) {
    const file = JSON.parse(written);
    if (file?.format !== FORMAT || !Array.isArray(file.conversations)) {
      throw new Error("the file has no conversations that were exported here");
    }
    const added = file.conversations.map(copyOf);
    for (const conversation of added) await this.put(conversation);
    return added.map((conversation) => conversation.id);
  }

  _store(name, mode) {
    return this._database.transaction(name, mode).objectStore(name);
  }
}

function settled(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

function finished(transaction) {
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
}

function summaryOf(conversation) {
  return { id: conversation.id, title: titleOf(conversation), updated: conversation.updated };
}

const words = (value) => (typeof value === "string" ? value : "");
const count = (value) => (Number.isFinite(value) ? value : null);
const list = (value) => (Array.isArray(value) ? value : []);

/** The fields that are known, of the kinds that are expected, under new ids. */
function copyOf(source) {
  const lanes = list(source.lanes).slice(0, 4).map(laneOf);
  if (new Set(lanes.map((lane) => lane.id)).size < lanes.length) lanes.forEach((lane, id) => (lane.id = id));
  const copy = newConversation(lanes);
  if (!copy.lanes.length) copy.lanes.push(newLane(""));
  copy.title = words(source.title).slice(0, 200);
  const old = new Map(Object.entries(source.nodes ?? {}));
  const seen = new Set([ROOT]);
  const pending = [[ROOT, ROOT]]; // old id, new id
  for (let at = 0; at < pending.length; at += 1) {
    const [from, to] = pending[at];
    let selected = null;
    for (const id of list(old.get(from)?.children)) {
      if (seen.has(id) || !old.has(id)) continue;
      seen.add(id);
      const fields = fieldsOf(old.get(id));
      if (!fields) continue;
      const node = addNode(copy, to, fields);
      if (id === old.get(from).selected) selected = node.id;
      pending.push([id, node.id]);
    }
    copy.nodes[to].selected = selected ?? copy.nodes[to].selected;
  }
  copy.updated = count(source.updated) ?? Date.now();
  return copy;
}

function laneOf(source) {
  const values = {};
  for (const [name, value] of Object.entries(source?.values ?? {})) {
    if (typeof value === "string") values[name] = value;
    else if (name === "response_format") {
      values[name] = { kind: words(value?.kind), text: words(value?.text) };
    }
  }
  const id = [0, 1, 2, 3].includes(source?.id) ? source.id : 0;
  return { id, model: words(source?.model), system: words(source?.system), values };
}

function fieldsOf(node) {
  if (node.kind === "user") {
    const images = list(node.images).filter((url) => words(url).startsWith("data:image/"));
    return { kind: "user", text: words(node.text), ...(images.length ? { images } : {}) };
  }
  if (node.kind === "results") {
    const results = {};
    for (const [entry, given] of Object.entries(node.results ?? {})) {
      const texts = Object.entries(given ?? {}).map(([id, text]) => [id, words(text)]);
      results[Number(entry) || 0] = Object.fromEntries(texts);
    }
    return { kind: "results", results };
  }
  const entries = list(node.entries).map(entryFrom);
  if (node.kind !== "answers" || !entries.length) return null;
  const kept = entries[node.kept] ? node.kept : null;
  return { kind: "answers", entries, kept, without: list(node.without).filter(Number.isInteger) };
}

function entryFrom(source) {
  const entry = newEntry(count(source.lane) ?? 0, count(source.choice) ?? 0, laneOf(source.settings));
  for (const name of ["content", "reasoning"]) entry[name] = words(source[name]);
  for (const name of ["tokens", "promptTokens", "cachedTokens"]) entry[name] = count(source[name]) ?? 0;
  for (const name of ["firstSeconds", "seconds"]) entry[name] = count(source[name]);
  entry.finish = words(source.finish) || null;
  entry.error = words(source.error) || null;
  entry.state = ["done", "stopped", "failed"].includes(source.state) ? source.state : "stopped";
  entry.calls = list(source.calls).map((call) => ({
    id: words(call?.id), name: words(call?.name), arguments: words(call?.arguments),
  }));
  const scored = ([token, logprob]) => [words(token), count(logprob) ?? 0];
  entry.logprobs = list(source.logprobs).filter(Array.isArray)
    .map((each) => [...scored(each), list(each[2]).filter(Array.isArray).map(scored)]);
  const seconds = count(source.timings?.decode_seconds);
  entry.timings = seconds === null ? null : { decode_seconds: seconds };
  return entry;
}
