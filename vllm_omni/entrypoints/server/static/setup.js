// The form before the start: picture, prompt, size, seed; and what of it goes into a message.

import { Picture } from "./picture.js";
import { pickCapabilities } from "./protocol.js";
import { dom } from "./view.js";

const OWN_PICTURE = "Choose or drop a picture";

export class Setup {
  #startedWith = { url: null };
  #promptTouched = false;

  /** @param {() => void} pictureChanged */
  constructor(pictureChanged) {
    this.picture = new Picture(pictureChanged);
    this.#listen();
    this.#useScene();
  }

  /** Numbers of the form. */
  get size() {
    return { width: Number(dom.width.value), height: Number(dom.height.value) };
  }

  get fps() {
    return Number(dom.fps.value);
  }

  get leadMs() {
    return Number(dom.lead.value);
  }

  /** Take the server's defaults where the viewer has not chosen yet. */
  async loadDefaults() {
    const response = await fetch("v1/realtime/capabilities").catch(() => null);
    if (!response?.ok) return;
    const { width, height, native_fps: fps } = pickCapabilities(await response.json());
    if (width && height) {
      dom.width.value = width;
      dom.height.value = height;
    }
    if (fps) dom.fps.value = fps;
    this.#sizeChanged();
  }

  /** Fields of `session.start`. */
  async startFields() {
    this.#startedWith = { url: this.picture.url };
    return {
      format: "m4s",
      prompt: dom.prompt.value,
      image_reference: { image_url: await this.picture.dataUrl() },
      ...this.size,
      fps: this.fps,
      seed: Number(dom.seed.value),
      queue: true,
      unbounded: true,
      max_lead_ms: this.leadMs,
    };
  }

  /** Fields of `session.reset`; the picture only if it is another one. */
  async resetFields() {
    const fields = { prompt: dom.prompt.value, seed: Number(dom.seed.value) };
    if (this.picture.url === this.#startedWith.url) return fields;
    this.#startedWith = { url: this.picture.url };
    return { ...fields, image_reference: { image_url: await this.picture.dataUrl() } };
  }

  #listen() {
    dom.prompt.addEventListener("input", () => {
      this.#promptTouched = true;
    });
    dom.pictures.addEventListener("change", ({ target }) => {
      if (target.name === "picture") this.#useScene();
    });
    dom.file.addEventListener("change", () => this.#useFile(dom.file.files[0]));
    for (const input of [dom.width, dom.height]) {
      input.addEventListener("change", () => this.#sizeChanged());
    }
    this.#listenToDrops();
  }

  #listenToDrops() {
    let depth = 0;
    const mark = (change) => {
      depth = Math.max(0, depth + change);
      document.body.classList.toggle("dragging", depth > 0);
    };
    addEventListener("dragenter", () => mark(1));
    addEventListener("dragleave", () => mark(-1));
    addEventListener("dragover", (event) => event.preventDefault());
    addEventListener("drop", (event) => {
      event.preventDefault();
      mark(-depth);
      this.#useFile(event.dataTransfer.files[0]);
    });
  }

  #useScene() {
    const chosen = dom.pictures.querySelector('[name="picture"]:checked');
    if (!this.#promptTouched) dom.prompt.value = chosen.dataset.prompt;
    this.picture.useScene(chosen.value, this.size);
    this.#showOwn(null);
  }

  #useFile(file) {
    if (!file) return;
    for (const radio of dom.pictures.querySelectorAll('[name="picture"]')) radio.checked = false;
    this.picture.useFile(file);
    this.#showOwn(file.name);
  }

  #showOwn(name) {
    dom.own.classList.toggle("chosen", name !== null);
    dom.ownName.textContent = name ?? OWN_PICTURE;
  }

  #sizeChanged() {
    if (!dom.width.validity.valid || !dom.height.validity.valid) return;
    if (dom.pictures.querySelector('[name="picture"]:checked')) this.#useScene();
  }
}
