/**
 * A conversation is a tree of nodes; what is read is the path of the selected children.
 *
 *   user     {text, images}   images: data URLs, if it has some
 *   answers  {entries, kept, without}   one entry for each setting, or for each of `n`
 *   results  {results: {entry's index: {call's id: text}}}   what the tools gave
 *
 * Retry, edit and the like add a sibling, so nothing that was written is lost.
 */

export const ROOT = "root";
const NO_RESULT = "No result was given.";

/** Not crypto.randomUUID, which only secure contexts have: this page may come by plain HTTP. */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function newConversation(lanes) {
  const root = { id: ROOT, parent: null, kind: ROOT, children: [], selected: null };
  return { id: newId(), title: "", updated: Date.now(), lanes, nodes: { [ROOT]: root } };
}

/** Add a child and select it. */
export function addNode(conversation, parent, fields) {
  const node = { id: newId(), parent, children: [], selected: null, ...fields };
  conversation.nodes[node.id] = node;
  conversation.nodes[parent].children.push(node.id);
  conversation.nodes[parent].selected = node.id;
  conversation.updated = Date.now();
  return node;
}

export function newEntry(lane, choice, settings) {
  return {
    lane, choice, settings, content: "", reasoning: "", calls: [], logprobs: [],
    state: "writing", finish: null, error: null, tokens: 0, promptTokens: 0, cachedTokens: 0,
    firstSeconds: null, seconds: null, timings: null,
  };
}

/** The nodes of the selected path, without the root. */
export function pathOf(conversation) {
  const path = [];
  let node = conversation.nodes[ROOT];
  while (node.selected) {
    node = conversation.nodes[node.selected];
    path.push(node);
  }
  return path;
}

/** The path from the first node to this one. */
export function pathTo(conversation, id) {
  const path = [];
  for (let node = conversation.nodes[id]; node.kind !== ROOT; node = conversation.nodes[node.parent]) {
    path.unshift(node);
  }
  return path;
}

export function lastNode(conversation) {
  return pathOf(conversation).at(-1) ?? conversation.nodes[ROOT];
}

/** Where a node stands among its siblings: {index, ids}. */
export function versionsOf(conversation, node) {
  const ids = conversation.nodes[node.parent].children;
  return { index: ids.indexOf(node.id), ids };
}

export function select(conversation, id) {
  conversation.nodes[conversation.nodes[id].parent].selected = id;
}

/** The index of the entry with which the setting of this id goes on; -1 for none. */
export function entryOf(node, lane) {
  if (node.kept !== null && node.kept !== undefined) return node.kept;
  const own = node.entries.findIndex((entry) => entry.lane === lane);
  if (own >= 0) return own;
  return (node.without ?? []).includes(lane) ? -1 : 0;
}

export function callsOf(node, lane) {
  const index = entryOf(node, lane);
  return index < 0 ? [] : wholeCalls(node.entries[index]);
}

/** Calls that were stopped half written are none: their arguments are no JSON. */
function wholeCalls(entry) {
  return entry.state === "done" ? entry.calls : [];
}

/** What the API calls `messages`: the path to node `id`, as `lane` has seen it. */
export function messagesFor(conversation, id, lane, system) {
  const messages = system ? [{ role: "system", content: system }] : [];
  const path = pathTo(conversation, id);
  path.forEach((node, place) => {
    if (node.kind === "user") messages.push({ role: "user", content: contentOf(node) });
    if (node.kind !== "answers") return;
    const index = entryOf(node, lane);
    const entry = node.entries[index];
    if (!entry || !(entry.content || wholeCalls(entry).length)) return; // it failed, say
    messages.push(answerMessage(entry));
    const next = path[place + 1];
    const given = next?.kind === "results" ? next.results[index] : null;
    for (const call of wholeCalls(entry)) {
      const content = given?.[call.id] ?? NO_RESULT;
      messages.push({ role: "tool", tool_call_id: call.id, content });
    }
  });
  return messages;
}

/** Images stand before the text, as models are trained with them. */
function contentOf(node) {
  if (!node.images?.length) return node.text;
  const parts = node.images.map((url) => ({ type: "image_url", image_url: { url } }));
  return node.text.trim() ? [...parts, { type: "text", text: node.text }] : parts;
}

function answerMessage(entry) {
  const message = { role: "assistant", content: entry.content };
  if (entry.reasoning) message.reasoning_content = entry.reasoning;
  const calls = wholeCalls(entry);
  if (calls.length) {
    message.content = entry.content || null;
    message.tool_calls = calls.map((call) => ({
      id: call.id, type: "function", function: { name: call.name, arguments: call.arguments },
    }));
  }
  return message;
}

/** A new conversation that holds the path to node `id`, and goes on by itself. */
export function branch(conversation, id) {
  const copy = newConversation(structuredClone(conversation.lanes));
  copy.title = conversation.title ? `${conversation.title} (branch)` : "";
  let parent = ROOT;
  for (const node of pathTo(conversation, id)) {
    const { id: old, parent: above, children, selected, ...fields } = structuredClone(node);
    parent = addNode(copy, parent, fields).id;
  }
  return copy;
}

export function titleOf(conversation) {
  if (conversation.title) return conversation.title;
  const first = Object.values(conversation.nodes).find((node) => node.kind === "user");
  if (!first) return "New conversation";
  const line = first.text.trim().split("\n")[0].slice(0, 60);
  return line || (first.images?.length ? "Images" : "Untitled");
}
