// What of the page is open: panels, full screen, and controls that fade while nobody moves.

import { dom } from "./view.js";

const CALM_AFTER_MS = 3000;
const PANELS = { setup: dom.setupToggle, live: dom.liveToggle };

export class Layout {
  #calmTimer = null;

  constructor() {
    for (const [name, button] of Object.entries(PANELS)) {
      button.addEventListener("click", () => this.open(this.#panel === name ? "" : name));
    }
    dom.full.hidden = !document.fullscreenEnabled;
    dom.full.addEventListener("click", () => this.#toggleFullScreen());
    dom.stage.addEventListener("dblclick", ({ target }) => {
      if (!target.closest("button")) this.#toggleFullScreen();
    });
    document.addEventListener("fullscreenchange", () => {
      dom.full.ariaPressed = String(document.fullscreenElement !== null);
    });
    for (const kind of ["pointermove", "pointerdown", "focusin"]) {
      dom.scene.addEventListener(kind, () => this.#stir());
    }
  }

  /** Whether a world is shown or on its way: the picture gets the room. */
  get walking() {
    return document.body.dataset.mode === "walk";
  }

  set walking(walking) {
    if (walking === this.walking) return;
    document.body.dataset.mode = walking ? "walk" : "choose";
    if (walking) this.close("setup");
    if (!walking && this.#panel === "") this.open("setup");
    this.#stir();
  }

  /** Open one panel, `setup` or `live`, or none. */
  open(panel) {
    const left = dom[this.#panel]?.contains(document.activeElement);
    document.body.dataset.panel = panel;
    for (const [name, button] of Object.entries(PANELS)) {
      dom[name].hidden = name !== panel;
      button.ariaExpanded = String(name === panel);
    }
    if (left) dom.stage.focus({ preventScroll: true });
  }

  /** Close a panel, if it is open. */
  close(panel) {
    if (this.#panel === panel) this.open("");
  }

  /** F; told by the controls, which know when a key is a letter. */
  toggleFullScreen() {
    if (document.fullscreenEnabled) this.#toggleFullScreen();
  }

  get #panel() {
    return document.body.dataset.panel;
  }

  #toggleFullScreen() {
    const change = document.fullscreenElement
      ? document.exitFullscreen()
      : dom.scene.requestFullscreen();
    change.catch(() => {});
  }

  #stir() {
    dom.scene.classList.remove("calm");
    clearTimeout(this.#calmTimer);
    this.#calmTimer = setTimeout(() => {
      dom.scene.classList.toggle("calm", this.walking);
    }, CALM_AFTER_MS);
  }
}
