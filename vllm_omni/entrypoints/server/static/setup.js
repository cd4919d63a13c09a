// The form before the start: picture, prompt, size, seed; and what of it goes into a message.

import { Picture } from "./picture.js";
import { dom } from "./view.js";

const OWN_PICTURE = "Your own picture";
const OWN_PROMPT = "Say what your picture shows.";

export class Setup {
  #startedWith = null;
  #prompts = new Map();
  #chosen;

  /**
   * @param {{pictureChanged: () => void, sceneChosen: () => void, fileChosen: () => void}} callbacks
   */
  constructor(callbacks) {
    this.#chosen = callbacks;
    this.picture = new Picture(() => callbacks.pictureChanged());
    this.#listen();
    this.#useScene(dom.pictures.querySelector("[data-scene]"));
  }

  get size() {
    return { width: Number(dom.width.value), height: Number(dom.height.value) };
  }

  set size({ width, height }) {
    dom.width.value = width;
    dom.height.value = height;
    this.#sizeChanged();
  }

  get fps() {
    return Number(dom.fps.value);
  }

  /** What to call the world. */
  get name() {
    const { fileName, sceneName } = this.picture;
    return fileName ?? this.#tile(sceneName).textContent.trim();
  }

  /** Whether the form can be sent. */
  get complete() {
    return dom.setup.checkValidity();
  }

  /** Show what the form still needs. */
  askForMissing() {
    dom.setup.querySelector(":invalid:not(fieldset)")?.closest("details")?.setAttribute("open", "");
    dom.setup.reportValidity();
  }

  /** Take the server's defaults. */
  takeDefaults({ width, height, native_fps: fps }) {
    if (fps) dom.fps.value = fps;
    if (width && height) this.size = { width, height };
  }

  /** Fields of `session.start`. */
  async startFields() {
    this.#startedWith = this.picture.url;
    return {
      format: "m4s",
      prompt: dom.prompt.value,
      image_reference: { image_url: await this.picture.dataUrl() },
      ...this.size,
      fps: this.fps,
      seed: Number(dom.seed.value),
      queue: true,
      unbounded: true,
      max_lead_ms: Number(dom.lead.value),
    };
  }

  /** Fields of `session.reset`; the picture only if it is another one. */
  async resetFields() {
    const fields = { prompt: dom.prompt.value, seed: Number(dom.seed.value) };
    if (this.picture.url === this.#startedWith) return fields;
    this.#startedWith = this.picture.url;
    return { ...fields, image_reference: { image_url: await this.picture.dataUrl() } };
  }

  #listen() {
    // What somebody writes belongs to the picture that it was written for.
    dom.prompt.addEventListener("input", () => {
      this.#prompts.set(this.#promptKey, dom.prompt.value);
    });
    for (const tile of dom.pictures.querySelectorAll("[data-scene]")) {
      tile.addEventListener("click", () => {
        this.#useScene(tile);
        this.#chosen.sceneChosen();
      });
    }
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

  get #promptKey() {
    return this.picture.sceneName ?? this.picture.url;
  }

  #tile(scene) {
    return dom.pictures.querySelector(`[data-scene="${scene}"]`);
  }

  #useScene(tile) {
    this.picture.useScene(tile.dataset.scene, this.size);
    dom.prompt.value = this.#prompts.get(this.#promptKey) ?? tile.dataset.prompt;
    dom.prompt.placeholder = "";
    this.#mark(tile);
  }

  #useFile(file) {
    if (!file) return;
    this.picture.useFile(file);
    dom.ownName.textContent = file.name;
    dom.ownThumb.src = this.picture.url;
    dom.ownThumb.hidden = false;
    dom.ownThumb.onerror = () => {
      dom.ownThumb.hidden = true;
    };
    // The same file can be chosen once more.
    dom.file.value = "";
    dom.prompt.value = "";
    dom.prompt.placeholder = OWN_PROMPT;
    this.#mark(dom.own);
    this.#chosen.fileChosen();
    dom.prompt.focus();
  }

  #mark(chosen) {
    for (const tile of dom.pictures.querySelectorAll(".tile")) {
      tile.classList.toggle("chosen", tile === chosen);
    }
    if (chosen === dom.own) return;
    dom.ownName.textContent = OWN_PICTURE;
    dom.ownThumb.hidden = true;
  }

  #sizeChanged() {
    if (!dom.width.validity.valid || !dom.height.validity.valid) return;
    const { sceneName } = this.picture;
    if (sceneName) this.picture.useScene(sceneName, this.size);
    else this.#chosen.pictureChanged();
  }
}
