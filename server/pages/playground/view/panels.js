/** The panels at the sides: beside the conversation where there is room, above it where not. */

const WIDE = { conversations: "(min-width: 60rem)", settings: "(min-width: 75rem)" };

export class Panels {
  constructor() {
    for (const name of Object.keys(WIDE)) {
      this._button(name).addEventListener("click", () => this._toggle(name));
      const wide = matchMedia(WIDE[name]);
      wide.addEventListener("change", () => this._set(name, wide.matches));
      this._set(name, wide.matches);
    }
    document.getElementById("shade").addEventListener("click", () => this.narrow());
  }

  show(name) {
    this._set(name, true);
  }

  /** Close those that cover the conversation. */
  narrow() {
    for (const [name, wide] of Object.entries(WIDE)) {
      if (!matchMedia(wide).matches) this._set(name, false);
    }
  }

  _toggle(name) {
    const open = this._panel(name).hidden;
    this.narrow();
    this._set(name, open);
    if (open && !matchMedia(WIDE[name]).matches) {
      this._panel(name).querySelector("button, input, select, textarea")?.focus();
    }
  }

  _set(name, open) {
    const panel = this._panel(name);
    const held = panel.contains(document.activeElement);
    panel.hidden = !open;
    this._button(name).setAttribute("aria-expanded", String(open));
    if (held && !open) this._button(name).focus();
    const covered = Object.entries(WIDE).some(([each, wide]) =>
      !this._panel(each).hidden && !matchMedia(wide).matches);
    document.getElementById("shade").hidden = !covered;
  }

  _panel(name) {
    return document.getElementById(`${name}-panel`);
  }

  _button(name) {
    return document.getElementById(`${name}-button`);
  }
}
