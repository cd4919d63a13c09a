// Held directions from keyboard, on-screen pads, drags and gamepad, merged; a release is never lost.

import { Drags } from "./drag.js";

const KEYS = {
  KeyW: { axis: "forward", sign: 1 },
  KeyS: { axis: "forward", sign: -1 },
  KeyD: { axis: "right", sign: 1 },
  KeyA: { axis: "right", sign: -1 },
  KeyL: { axis: "yaw", sign: 1 },
  KeyJ: { axis: "yaw", sign: -1 },
  KeyI: { axis: "pitch", sign: 1 },
  KeyK: { axis: "pitch", sign: -1 },
  ArrowUp: { axis: "forward", sign: 1 },
  ArrowDown: { axis: "forward", sign: -1 },
  ArrowRight: { axis: "yaw", sign: 1 },
  ArrowLeft: { axis: "yaw", sign: -1 },
};
const AXES = [...new Set(Object.values(KEYS).map(({ axis }) => axis))];
const DEAD_ZONE = 0.18;
const STICK_LEVELS = 5;
const D_PAD = { forward: [12, 13], right: [15, 14] };
// Where keys have a meaning of their own.
const DEAF = 'input:not([type="file"]), textarea, select, .log, dialog, dialog *';

export class Controls {
  #held = new Map();
  #sticks = {};
  #drags;
  #enabled;
  #changed;
  #polling = false;

  /**
   * @param {{pads: HTMLElement, stage: HTMLElement}} elements; `pads` has buttons with data-key
   * @param {{enabled: () => boolean, changed: () => void, fullScreen: () => void}} callbacks
   */
  constructor({ pads, stage }, { enabled, changed, fullScreen }) {
    this.#enabled = enabled;
    this.#changed = changed;
    this.#drags = new Drags(stage, { enabled, changed });
    this.#listenToKeys(fullScreen);
    for (const button of pads.querySelectorAll("[data-key]")) this.#listenToButton(button);
    this.#listenToReleases();
    addEventListener("gamepadconnected", () => this.#pollGamepads());
  }

  /** Directions in [-1, 1]: forward, right, yaw (right) and pitch (up). */
  get axes() {
    const sums = Object.fromEntries(AXES.map((axis) => [axis, 0]));
    const pressed = new Set([...this.#held.values()].map((code) => KEYS[code]));
    for (const { axis, sign } of pressed) sums[axis] += sign;
    for (const sticks of [this.#sticks, ...this.#drags.axes]) {
      for (const [axis, value] of Object.entries(sticks)) sums[axis] += value;
    }
    return Object.fromEntries(AXES.map((axis) => [axis, Math.max(-1, Math.min(1, sums[axis]))]));
  }

  /** Let go of everything. */
  release() {
    this.#drags.release();
    if (!this.#held.size) return;
    this.#held.clear();
    this.#changed();
  }

  #hold(source, key) {
    if (this.#held.get(source) === key) return;
    this.#held.set(source, key);
    this.#changed();
  }

  #letGo(source) {
    if (this.#held.delete(source)) this.#changed();
  }

  #listenToKeys(fullScreen) {
    addEventListener("keydown", (event) => {
      const { code, target } = event;
      if (event.ctrlKey || event.metaKey || event.altKey || !this.#enabled()) return;
      if (target instanceof Element && target.matches(DEAF)) return;
      if (code === "KeyF" && !event.repeat) fullScreen();
      if (!(code in KEYS)) return;
      event.preventDefault();
      if (!event.repeat) this.#hold(`key ${code}`, code);
    });
    addEventListener("keyup", ({ code }) => this.#letGo(`key ${code}`));
  }

  #listenToButton(button) {
    const hold = (source) => this.#hold(source, button.dataset.key);
    button.addEventListener("pointerdown", (event) => {
      button.setPointerCapture(event.pointerId);
      hold(`pointer ${event.pointerId}`);
    });
    for (const end of ["pointerup", "pointercancel", "lostpointercapture"]) {
      button.addEventListener(end, ({ pointerId }) => this.#letGo(`pointer ${pointerId}`));
    }
    button.addEventListener("keydown", ({ code, repeat }) => {
      if ((code === "Space" || code === "Enter") && !repeat) hold(`button ${code}`);
    });
    button.addEventListener("keyup", ({ code }) => this.#letGo(`button ${code}`));
    button.addEventListener("blur", () => this.#letGoButtons());
    button.addEventListener("contextmenu", (event) => event.preventDefault());
  }

  #letGoButtons() {
    this.#letGo("button Space");
    this.#letGo("button Enter");
  }

  #listenToReleases() {
    addEventListener("blur", () => this.release());
    addEventListener("pagehide", () => this.release());
    document.addEventListener("visibilitychange", () => this.release());
    document.addEventListener("focusin", ({ target }) => {
      if (target.matches(DEAF)) this.release();
    });
    // A key released while the system key is down never reports its release.
    addEventListener("keyup", ({ key }) => {
      if (key === "Meta") this.release();
    });
  }

  #pollGamepads() {
    if (this.#polling) return;
    this.#polling = true;
    const poll = () => {
      const pad = navigator.getGamepads().find((candidate) => candidate?.connected);
      this.#readSticks(pad);
      this.#polling = Boolean(pad);
      if (pad) requestAnimationFrame(poll);
    };
    poll();
  }

  #readSticks(pad) {
    const [x = 0, y = 0, lookX = 0, lookY = 0] = document.hidden ? [] : (pad?.axes ?? []);
    const cross = (axis) => {
      const [plus, minus] = D_PAD[axis].map((index) => Number(pad?.buttons?.[index]?.pressed ?? 0));
      return plus - minus;
    };
    const sticks = {
      forward: step(-y) + cross("forward"),
      right: step(x) + cross("right"),
      yaw: step(lookX),
      pitch: step(-lookY),
    };
    const same = Object.entries(sticks).every(([axis, value]) => value === (this.#sticks[axis] ?? 0));
    this.#sticks = sticks;
    if (!same) this.#changed();
  }
}

/** Codes of the on-screen buttons whose directions these are. */
export function directionsOf(axes) {
  const letters = Object.entries(KEYS).filter(([code]) => code.startsWith("Key"));
  return new Set(letters.filter(([, { axis, sign }]) => axes[axis] * sign > 0).map(([code]) => code));
}

/** A stick position in a few levels, so that a trembling thumb sends nothing. */
function step(value) {
  const beyond = Math.max(0, Math.abs(value) - DEAD_ZONE) / (1 - DEAD_ZONE);
  return (Math.sign(value) * Math.round(beyond * STICK_LEVELS)) / STICK_LEVELS || 0;
}
