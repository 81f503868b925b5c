/** The conversations that this browser keeps. */

import { button, h } from "./dom.js";

export class Sidebar {
  /** opened: called when one was chosen; refused(message): for a file that cannot be read */
  constructor(playground, element, { opened, refused }) {
    Object.assign(this, { playground, element, opened, refused });
    this.items = h("ul", { class: "conversations", "aria-label": "Conversations" });
    const file = h("input", { type: "file", accept: ".json,application/json", hidden: true,
      onchange: () => this._import(file) });
    element.append(
      button("New conversation", () => {
        playground.start();
        opened();
      }, { class: "primary wide" }),
      this.items,
      h("div", { class: "actions" },
        button("Export all", async () => save(await playground.storage.exported(), "conversations")),
        button("Import", () => file.click()),
        file),
      h("p", { class: "help" }, "Kept in this browser only."));
  }

  async show() {
    const all = await this.playground.storage.list();
    const current = this.playground.conversation.id;
    // Drawn anew only for what can be seen, so that an open menu stays.
    const seen = JSON.stringify([current, all.map(({ id, title }) => [id, title])]);
    if (seen === this._seen) return;
    this._seen = seen;
    this.items.replaceChildren(...all.map((each) => this._item(each, each.id === current)));
  }

  _item({ id, title }, current) {
    const open = button(title, async () => {
      await this.playground.open(id);
      this.opened();
    }, { class: "title", title, "aria-current": current ? "true" : null });
    const menu = h("details", { class: "menu", onfocusout: (event) => {
      if (event.relatedTarget && !menu.contains(event.relatedTarget)) menu.open = false;
    } },
      h("summary", { "aria-label": `More on ${title}` }, "⋯"),
      h("div", {},
        button("Rename", () => this._rename(item, id, title)),
        button("Export", async () => save(await this.playground.storage.exported([id]), title)),
        this._remove(id)));
    const item = h("li", { class: current ? "current" : null }, open, menu);
    return item;
  }

  /** A second press removes it. */
  _remove(id) {
    const remove = button("Delete", () => {
      if (remove.textContent === "Delete") remove.textContent = "Really delete";
      else this.playground.remove(id);
    });
    return remove;
  }

  _rename(item, id, title) {
    const field = h("input", { type: "text", value: title, "aria-label": "New title", maxlength: "200" });
    let done = false;
    const finish = (keep) => {
      if (done) return;
      done = true;
      this._seen = null;
      if (keep && field.value.trim()) this.playground.rename(id, field.value);
      else this.show();
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter") finish(true);
      if (event.key === "Escape") {
        event.stopPropagation();
        finish(false);
      }
    });
    field.addEventListener("blur", () => finish(true));
    item.replaceChildren(field);
    field.focus();
    field.select();
  }

  async _import(file) {
    const [chosen] = file.files;
    file.value = "";
    if (!chosen) return;
    try {
      const [first] = await this.playground.storage.imported(await chosen.text());
      if (first) await this.playground.open(first);
      this.opened();
    } catch (error) {
      this.refused(`${chosen.name} was not imported: ${error.message}`);
    }
  }
}

function save(text, name) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const plain = name.toLowerCase().replace(/[^a-z0-9]+/g, "-").slice(0, 40);
  const link = h("a", { href: url, download: `wavefill-${plain}.json` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}
