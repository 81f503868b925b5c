/** The API key: asked for in a dialog, kept for the tab, or for longer if that is wanted. */

const NAME = "wavefill-api-key";

export function storedKey() {
  try {
    return sessionStorage.getItem(NAME) ?? localStorage.getItem(NAME) ?? "";
  } catch {
    return ""; // the browser keeps nothing for this page
  }
}

function storeKey(key, remember) {
  try {
    sessionStorage.setItem(NAME, key);
    if (remember) localStorage.setItem(NAME, key);
    else localStorage.removeItem(NAME);
  } catch {
    // It is kept while the page is open.
  }
}

export class KeyDialog {
  /** given(key): called with the key that was typed */
  constructor(dialog, given) {
    this.dialog = dialog;
    this.field = dialog.querySelector("input[type=password]");
    this.error = dialog.querySelector(".error");
    const remember = dialog.querySelector("input[type=checkbox]");
    dialog.querySelector("form").addEventListener("submit", (event) => {
      event.preventDefault();
      const key = this.field.value.trim();
      if (!key) return;
      storeKey(key, remember.checked);
      dialog.close();
      given(key);
    });
    dialog.querySelector("button[type=button]").addEventListener("click", () => dialog.close());
  }

  /** reason: why the server did not take the last one; "" if none was sent */
  ask(reason) {
    this.error.textContent = reason;
    this.field.setAttribute("aria-invalid", String(reason !== ""));
    if (!this.dialog.open) this.dialog.showModal();
    this.field.select();
  }
}
