/** The images of the next message: picked, pasted or dropped, and shown until they are sent. */

import { button, fill, h } from "./dom.js";

export class Pictures {
  /**
   * limits() returns what the model reads of images, or null, and sent() how many images the
   * conversation has; say tells why a file is not taken.
   */
  constructor(limits, sent, say) {
    Object.assign(this, { limits, sent, say });
    this.urls = [];
    this.reading = null; // while files are read: a promise of whether one was refused
    this.element = h("div", { class: "pictures", role: "list", "aria-label": "Images to send" });
    this.picker = button("+", () => this._pick(), {
      "aria-label": "Add images", title: "Add images: pick, paste or drop them", class: "quiet",
    });
    this.update();
  }

  update() {
    this.picker.hidden = this.limits() === null;
    this.element.hidden = this.urls.length === 0;
    fill(this.element, this.urls.map((url, place) => h("span", { class: "picture", role: "listitem" },
      h("img", { src: url, alt: `Image ${place + 1}` }),
      button("×", () => this._remove(place), { "aria-label": `Remove image ${place + 1}` }))));
  }

  /** The URLs of the images, which are sent now. */
  take() {
    const taken = this.urls;
    this.urls = [];
    this.update();
    return taken;
  }

  /** Whether one of the files is an image, so that nothing else is to be done with them. */
  add(files) {
    const images = [...files].filter((file) => file.type.startsWith("image/"));
    if (images.length) {
      const before = this.reading;
      const reading = Promise.resolve(before).then(() => this._read(images)).finally(() => {
        if (this.reading === reading) this.reading = null;
      });
      this.reading = reading;
    }
    return images.length > 0;
  }

  /** Returns whether a file was refused. */
  async _read(files) {
    const limits = this.limits();
    if (limits === null) {
      this.say("This model reads text alone, no images.");
      return true;
    }
    this.say("");
    let refused = false;
    const refuse = (why) => {
      this.say(why);
      refused = true;
    };
    for (const file of files) {
      if (!limits.media_types.includes(file.type)) {
        refuse(`${file.name} is of type ${file.type}: this model reads ${limits.media_types.join(", ")}.`);
      } else if (this.sent() + this.urls.length >= limits.max_images) {
        const sent = this.sent();
        const before = sent ? `, and its messages have ${sent}: begin a new one` : "";
        refuse(`A conversation may have at most ${limits.max_images} images${before}.`);
      } else {
        try {
          this.urls.push(await dataUrl(file));
        } catch {
          refuse(`${file.name} cannot be read.`);
        }
      }
    }
    this.update();
    return refused;
  }

  _pick() {
    const accept = this.limits().media_types.join(",");
    // Kept, so that it is not gone before the files are chosen.
    this._input = h("input", { type: "file", multiple: true, accept,
      onchange: () => this.add(this._input.files) });
    this._input.click();
  }

  _remove(place) {
    this.urls.splice(place, 1);
    this.update();
    this.picker.focus();
  }
}

/** What was sent, in the conversation. */
export function picturesView(urls) {
  if (!urls?.length) return null;
  return h("div", { class: "pictures" }, urls.map((url, place) =>
    h("img", { src: url, alt: `Image ${place + 1} of the message` })));
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
