/** The dashboard: connects the server's events with what is seen. */

import { KeyDialog, storedKey } from "../playground/view/key.js";
import { Feed } from "./feed.js";
import { Engines } from "./view/engines.js";
import { History } from "./history.js";
import { percent, seconds } from "./numbers.js";
import { Keys } from "./view/keys.js";
import { Memory } from "./view/memory.js";
import { PageMap } from "./view/pages.js";
import { Requests } from "./view/requests.js";
import { Steps } from "./view/steps.js";
import { Tiles } from "./view/tiles.js";
import { Waves } from "./view/waves.js";

const at = (id) => document.getElementById(id);
const placeOf = (id) => [at(id).querySelector(".body"), at(`${id}-lead`)];

const history = new History();
const tiles = new Tiles(at("tiles"));
const waves = new Waves(...placeOf("waves"));
const pages = new PageMap(...placeOf("pages"));
const steps = new Steps(...placeOf("steps"));
const engines = new Engines(at("engines"), showEngine);
const memory = new Memory(...placeOf("memory"));
const keys = new Keys(...placeOf("keys"));
const requests = new Requests(...placeOf("requests"), point);

let last = null; // the last event with figures of the engine
let focus = 0; // the sequence that the reader points at
let paused = false;

// Wherever a proxy puts the server, it is two folders above this file.
const feed = new Feed(new URL("../../", import.meta.url).href, {
  event: show,
  status: say,
  refused(status, message) {
    say(message, "bad");
    at("key-button").hidden = false;
    dialog.ask(feed.key || status === 403 ? message : "");
  },
});
feed.key = storedKey();
const dialog = new KeyDialog(at("key-dialog"), (key) => {
  feed.key = key;
  say("Connecting");
  feed.start();
});

function show(event) {
  const { server } = event;
  at("key-button").hidden = !server.keys;
  // The title has all of it where it is cut off.
  at("model").textContent = at("model").title = [server.model, server.device && `${server.model_type} on ${server.device}`, server.attention].filter(Boolean).join(" · ");
  say(...stateOf(server));
  engines.show(server);
  requests.show(event);
  if (!event.engine) {
    // An engine that has gone leaves no figures; one in a long step keeps those it sent.
    if (server.state !== "ready") clear();
    return;
  }
  last = event;
  document.body.classList.add("shown");
  history.add(event);
  draw();
  at("cost").textContent =
    `This page costs the server ${percent((event.sampler_seconds + event.engine.build_seconds) / event.interval)} of a core: ` +
    `${seconds(event.engine.build_seconds)} a second in the engine, ${seconds(event.sampler_seconds)} in the API process. ` +
    `Wavefill ${server.version}`;
}

function draw() {
  if (!last) return;
  tiles.show(last, history);
  waves.show(last, focus);
  pages.show(last, focus);
  steps.show(last);
  memory.show(last);
  keys.show(last, history);
}

function clear() {
  last = null;
  history.forget();
  document.body.classList.remove("shown");
}

function showEngine(index) {
  feed.engine = index;
  clear();
  if (!paused) feed.start();
}

function point(sequence) {
  const wanted = sequence || requests.kept;
  if (wanted === focus || !last) return;
  // A sequence that has ended has no pages to show.
  focus = last.engine.sequences.some((each) => each.id === wanted) ? wanted : 0;
  pages.show(last, focus);
  waves.show(last, focus);
}

function stateOf({ state, down, progress }) {
  if (state === "ready") return ["Live", "good"];
  if (state === "stalled") return ["The engine is silent", "bad"];
  if (state === "down") return [`The engine is down: ${down}`, "bad"];
  const share = progress?.total ? ` ${percent(progress.done / progress.total)}` : "";
  return [progress ? `Loading: ${progress.phase}${share}` : "Loading", "wait"];
}

/** kind: good, bad or wait */
function say(message, kind = "wait") {
  const status = at("status");
  if (status.textContent !== message) status.textContent = message;
  status.className = kind;
}

function pause(wanted) {
  paused = wanted;
  at("pause").setAttribute("aria-pressed", String(paused));
  at("pause").textContent = paused ? "Go on" : "Pause";
  if (paused) {
    feed.stop();
    say("Paused");
  } else {
    say("Connecting");
    feed.start();
  }
}

at("pause").addEventListener("click", () => pause(!paused));
at("key-button").addEventListener("click", () => dialog.ask(""));
// A page in the background asks for nothing.
document.addEventListener("visibilitychange", () => {
  if (paused || at("key-dialog").open) return;
  if (document.hidden) feed.stop();
  else if (!feed.running) feed.start();
});
let resized = 0;
addEventListener("resize", () => {
  cancelAnimationFrame(resized);
  resized = requestAnimationFrame(draw);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => requestAnimationFrame(draw));
feed.start();
