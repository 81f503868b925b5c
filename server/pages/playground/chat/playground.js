/**
 * What the page knows, and what can be done: the models, the conversation that is open, the answers
 * that are being written.  It has no elements; `notify(what, detail)` tells the views what changed:
 *
 *   open     another conversation, or other nodes of it      node     the text of a node
 *   list     the conversations that there are                models   the models, or the settings
 *   status   the server does or does not answer              key      a key is asked for
 *   refused  a message on why something was not done
 */

import { applyChunk } from "./answering.js";
import { bodyOf, newLane, problemsOf, streamed } from "./request.js";
import {
  addNode, branch, callsOf, lastNode, messagesFor, newConversation, newEntry, pathOf, select,
} from "./tree.js";

const SAVE_MS = 1500;
const RETRY_MS = 2000;
const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

export class Playground {
  constructor(api, storage, notify) {
    Object.assign(this, { api, storage, notify });
    this.models = [];
    this.conversation = newConversation([newLane("")]);
    this.running = new Map(); // id of a node -> {controller, conversation}
    this._saving = new Map(); // id of a conversation -> timer
    this._watching = false;
  }

  /** Ask for the models, which also tells whether the server answers and wants a key. */
  async connect() {
    try {
      this.models = (await this.api.models()).map((model) => ({
        id: model.id, context: model.max_model_len, images: model.images ?? null,
      }));
      this._useServedModels();
      this.notify("models");
      return await this.watch();
    } catch (error) {
      if (error.status === 401) return this.notify("key", error.message);
      if (error.status === 0 || error.status === 503) return this.watch();
      return this.notify("status", error.message);
    }
  }

  /** Until the server answers: say why it does not, and try again. */
  async watch() {
    if (this._watching) return;
    this._watching = true;
    let problem = await this.api.problem();
    const recovered = problem !== null;
    while (problem) {
      this.notify("status", problem.status === 0
        ? "The server does not answer. Trying again…" : `${problem.message}. Trying again…`);
      await wait(RETRY_MS);
      problem = await this.api.problem();
    }
    this._watching = false;
    this.notify("status", "");
    if (recovered) await this.connect();
  }

  _useServedModels() {
    const served = this.models.map((model) => model.id);
    for (const lane of this.conversation.lanes) {
      if (!served.includes(lane.model)) lane.model = served[0] ?? "";
    }
  }

  async open(id) {
    if (id === this.conversation.id) return true;
    const found = await this.storage.get(id);
    if (!found) return false;
    const live = [...this.running.values()].find((each) => each.conversation.id === id);
    this._show(live?.conversation ?? found);
    return true;
  }

  start() {
    this._show(newConversation(structuredClone(this.conversation.lanes)));
  }

  _show(conversation) {
    this.conversation = conversation;
    if (this.models.length) this._useServedModels();
    this.repair(conversation);
    this.notify("open");
    this.notify("models");
  }

  /** Answers that a closed page left half written. */
  repair(conversation) {
    for (const node of Object.values(conversation.nodes)) {
      if (node.kind !== "answers" || this.running.has(node.id)) continue;
      for (const entry of node.entries) if (entry.state === "writing") entry.state = "stopped";
    }
  }

  // ---- what the user does --------------------------------------------------------------------

  /** What all models that are asked read of images; null: one of them reads none. */
  imageLimits() {
    const asked = this.conversation.lanes.map((lane) =>
      this.models.find((model) => model.id === lane.model)?.images ?? null);
    return asked.includes(null) ? null : asked[0];
  }

  /** Images of the messages so far, which every further request has, too. */
  imagesSent() {
    return pathOf(this.conversation).reduce((count, node) => count + (node.images?.length ?? 0), 0);
  }

  /** Whether it was sent.  images: data URLs */
  send(text, images = []) {
    return this._say(lastNode(this.conversation).id, text, images);
  }

  /** The images of the message stay. */
  edit(node, text) {
    return this._say(node.parent, text, node.images ?? []);
  }

  _say(parent, text, images) {
    if (!(text.trim() || images.length) || this.busy() || this._refused()) return false;
    this._ask(parent, { kind: "user", text, ...(images.length ? { images } : {}) });
    return true;
  }

  sendResults(node, results) {
    if (this.busy() || this._refused()) return;
    this._ask(node.id, { kind: "results", results });
  }

  _ask(parent, fields) {
    const node = addNode(this.conversation, parent, fields);
    this._answer(node);
  }

  retry(node) {
    if (this.busy() || this._refused()) return;
    this._answer(this.conversation.nodes[node.parent]);
  }

  /** An answer in the user's own words, as another version of the node. */
  rewrite(node, index, text) {
    const copy = structuredClone(node);
    const entries = copy.entries;
    Object.assign(entries[index], { content: text, logprobs: [], finish: "edited", state: "done" });
    const fields = { kind: "answers", entries, kept: copy.kept, without: copy.without };
    addNode(this.conversation, node.parent, fields);
    this._changed();
  }

  keep(node, index) {
    node.kept = node.kept === index ? null : index;
    this._changed();
  }

  select(id) {
    select(this.conversation, id);
    this._changed();
  }

  async branch(node) {
    const copy = branch(this.conversation, node.id);
    await this.storage.put(copy);
    this._show(copy);
    this.notify("list");
  }

  stop() {
    for (const { controller, conversation } of this.running.values()) {
      if (conversation === this.conversation) controller.abort();
    }
  }

  busy() {
    return [...this.running.values()].some((each) => each.conversation === this.conversation);
  }

  async rename(id, title) {
    const conversation = id === this.conversation.id ? this.conversation : await this.storage.get(id);
    conversation.title = title.trim().slice(0, 200);
    await this.storage.put(conversation);
    this.notify("list");
  }

  async remove(id) {
    clearTimeout(this._saving.get(id));
    this._saving.delete(id);
    for (const each of this.running.values()) {
      if (each.conversation.id !== id) continue;
      each.removed = true;
      each.controller.abort();
    }
    await this.storage.remove(id);
    if (id === this.conversation.id) this.start();
    this.notify("list");
  }

  /** The body of the request that answers this node with these settings. */
  bodyFor(parent, lane, settings) {
    const messages = messagesFor(this.conversation, parent, lane, settings.system);
    return bodyOf(settings, messages);
  }

  // ---- answers -------------------------------------------------------------------------------

  _refused() {
    for (const [lane, settings] of this.conversation.lanes.entries()) {
      const [problem] = problemsOf(settings);
      if (!problem) continue;
      const { parameter, message } = problem;
      this.notify("refused", { lane, parameter, message: `${parameter.label}: ${message}` });
      return true;
    }
    return false;
  }

  _answer(parent) {
    const conversation = this.conversation;
    const before = conversation.nodes[parent.parent];
    const groups = conversation.lanes
      .map((settings) => ({ lane: settings.id, settings: structuredClone(settings) }))
      .filter(({ lane }) => parent.kind !== "results" || callsOf(before, lane).length);
    for (const group of groups) {
      const count = Number(group.settings.values.n) || 1;
      group.entries = Array.from({ length: count }, (_, choice) =>
        newEntry(group.lane, choice, group.settings));
    }
    const taking = groups.map((group) => group.lane);
    const without = conversation.lanes.map(({ id }) => id).filter((id) => !taking.includes(id));
    const entries = groups.flatMap((group) => group.entries);
    const node = addNode(conversation, parent.id, { kind: "answers", entries, kept: null, without });
    const run = { controller: new AbortController(), conversation, removed: false };
    this.running.set(node.id, run);
    this._changed();
    const asked = groups.map((group) => this._stream(run, parent.id, node, group));
    Promise.all(asked).then(() => {
      this.running.delete(node.id);
      if (run.removed) return;
      this._save(conversation, 0);
      this.notify("node", { node, conversation, ended: true });
    });
  }

  async _stream(run, parent, node, { lane, settings, entries }) {
    const { controller, conversation } = run;
    const began = performance.now();
    const set = (fields) => {
      for (const entry of entries) if (entry.state === "writing") Object.assign(entry, fields);
    };
    try {
      const messages = messagesFor(conversation, parent, lane, settings.system);
      const body = streamed(bodyOf(settings, messages));
      await this.api.stream(body, controller.signal, (chunk) => {
        applyChunk(entries, chunk, began);
        this._save(conversation, SAVE_MS);
        this.notify("node", { node, conversation });
      });
      set({ state: "failed", error: "The answer broke off." });
    } catch (error) {
      if (error.name === "AbortError") set({ state: "stopped" });
      else set({ state: "failed", error: error.message });
      if (error.status === 401) this.notify("key", error.message);
      if (error.status === 0 || error.status === 503) this.watch();
    }
    this.notify("node", { node, conversation });
  }

  _changed() {
    this._save(this.conversation, 0);
    this.notify("open");
  }

  /** Save within so many ms; only what has a message is kept. */
  _save(conversation, ms) {
    if (ms && this._saving.has(conversation.id)) return;
    clearTimeout(this._saving.get(conversation.id));
    const save = async () => {
      this._saving.delete(conversation.id);
      if (!pathOf(conversation).length) return;
      try {
        await this.storage.put(conversation);
      } catch (error) {
        this.notify("status", `This browser could not keep the conversation: ${error.message}`);
      }
      this.notify("list");
    };
    this._saving.set(conversation.id, setTimeout(save, ms));
  }

  /** Keep the settings that were changed, if the conversation has begun. */
  settingsChanged() {
    this._save(this.conversation, SAVE_MS);
  }
}
