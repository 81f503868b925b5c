/** The playground: connects what it knows (chat/) with what is seen (view/). */

import { Api } from "./chat/api.js";
import { Playground } from "./chat/playground.js";
import { Storage } from "./chat/storage.js";
import { figuresOf } from "./view/answer.js";
import { Composer } from "./view/composer.js";
import { KeyDialog, storedKey } from "./view/key.js";
import { Panels } from "./view/panels.js";
import { Settings } from "./view/settings.js";
import { Sidebar } from "./view/sidebar.js";
import { Thread } from "./view/thread.js";

const at = (id) => document.getElementById(id);

// Wherever a proxy puts the server, it is two folders above this file.
const api = new Api(new URL("../../", import.meta.url).href);
api.key = storedKey();
const storage = new Storage();
const playground = new Playground(api, storage, (what, detail) => views[what](detail));

const panels = new Panels();
const thread = new Thread(playground, at("scroller"), at("thread"), at("empty"));
const settings = new Settings(playground, at("settings"));
const composer = new Composer(playground, at("composer"), { say, complain, target: document });
const sidebar = new Sidebar(playground, at("conversations"), {
  opened() {
    panels.narrow();
    composer.focus();
  },
  refused: complain,
});
const keyDialog = new KeyDialog(at("key-dialog"), (key) => {
  api.key = key;
  playground.connect();
});

/** For a screen reader: what has happened, never each token. */
function say(message) {
  at("live").textContent = message;
}

function complain(message) {
  at("notice").textContent = message;
  at("notice").hidden = message === "";
}

/** Where keys are needed, a link to the documentation would be refused. */
function showKeyButton(needed) {
  at("key-button").hidden = !needed;
  at("docs").hidden = needed;
}

/** What the button beside the message does not say. */
function showSight() {
  at("sight").hidden = playground.imageLimits() === null;
}

const views = {
  open() {
    const { id } = playground.conversation;
    if (location.hash !== `#${id}`) history.replaceState(null, "", `#${id}`);
    complain("");
    showSight();
    thread.show();
    composer.update();
    sidebar.show();
  },
  list: () => sidebar.show(),
  models() {
    showKeyButton(api.key !== "");
    settings.show();
    composer.update();
    showSight();
    const [lane] = playground.conversation.lanes;
    at("model").textContent = at("model").title = lane.model; // which may be cut off
  },
  node({ node, conversation, ended }) {
    if (conversation !== playground.conversation) return;
    thread.changed(node);
    if (!ended) return;
    composer.update();
    const failed = node.entries.find((entry) => entry.error);
    say(failed ? failed.error : `The answer is complete: ${figuresOf(node.entries[0])}`);
  },
  status(message) {
    at("status").textContent = message;
    at("status").hidden = message === "";
  },
  key(message) {
    showKeyButton(true);
    keyDialog.ask(api.key ? message : "");
  },
  refused({ lane, parameter, message }) {
    complain(message);
    panels.show("settings");
    settings.reveal(lane, parameter);
  },
};

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.defaultPrevented) return;
  if (playground.busy()) {
    playground.stop();
    say("Stopped.");
  } else panels.narrow();
});
at("key-button").addEventListener("click", () => keyDialog.ask(""));
addEventListener("hashchange", () => playground.open(location.hash.slice(1)));

if (!(await storage.open())) {
  complain("This browser keeps nothing for this page: export what you want to keep.");
}
if (!(await playground.open(location.hash.slice(1)))) {
  thread.show();
  composer.update();
  settings.show();
  sidebar.show();
}
await playground.connect();
composer.focus();
