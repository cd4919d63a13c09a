// Held directions from keyboard, on-screen pad and gamepad, merged; a release is never lost.

const KEYS = {
  KeyW: { axis: "forward", sign: 1 },
  KeyS: { axis: "forward", sign: -1 },
  KeyD: { axis: "right", sign: 1 },
  KeyA: { axis: "right", sign: -1 },
  KeyL: { axis: "yaw", sign: 1 },
  KeyJ: { axis: "yaw", sign: -1 },
  KeyI: { axis: "pitch", sign: 1 },
  KeyK: { axis: "pitch", sign: -1 },
};
const AXES = ["forward", "right", "yaw", "pitch"];
const DEAD_ZONE = 0.18;
const STICK_LEVELS = 5;
const TEXT_FIELDS = 'input:not([type="radio"], [type="file"]), textarea, select';

export class Controls {
  #held = new Map();
  #sticks = Object.fromEntries(AXES.map((axis) => [axis, 0]));
  #changed;
  #polling = false;

  /** @param {HTMLElement} pad buttons with data-key; @param {() => void} changed */
  constructor(pad, changed) {
    this.#changed = changed;
    this.#listenToKeys();
    this.#listenToPad(pad);
    this.#listenToReleases();
    addEventListener("gamepadconnected", () => this.#pollGamepads());
  }

  /** Directions in [-1, 1]: forward, right, yaw (right) and pitch (up). */
  get axes() {
    const sums = { ...this.#sticks };
    for (const key of new Set(this.#held.values())) sums[KEYS[key].axis] += KEYS[key].sign;
    return Object.fromEntries(AXES.map((axis) => [axis, Math.max(-1, Math.min(1, sums[axis]))]));
  }

  /** Codes of the keys that are held, by whatever means. */
  get held() {
    return new Set(this.#held.values());
  }

  /** Let go of everything. */
  release() {
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

  #listenToKeys() {
    addEventListener("keydown", (event) => {
      const { code, target } = event;
      if (!(code in KEYS) || event.ctrlKey || event.metaKey || event.altKey) return;
      if (target instanceof Element && target.matches(TEXT_FIELDS)) return;
      event.preventDefault();
      if (!event.repeat) this.#hold(`key ${code}`, code);
    });
    addEventListener("keyup", ({ code }) => this.#letGo(`key ${code}`));
  }

  #listenToPad(pad) {
    for (const button of pad.querySelectorAll("[data-key]")) {
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
      if (target.matches(TEXT_FIELDS)) this.release();
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
    const sticks = { forward: step(-y), right: step(x), yaw: step(lookX), pitch: step(-lookY) };
    const same = AXES.every((axis) => sticks[axis] === this.#sticks[axis]);
    this.#sticks = sticks;
    if (!same) this.#changed();
  }
}

/** A stick position in a few levels, so that a trembling thumb sends nothing. */
function step(value) {
  const beyond = Math.max(0, Math.abs(value) - DEAD_ZONE) / (1 - DEAD_ZONE);
  return (Math.sign(value) * Math.round(beyond * STICK_LEVELS)) / STICK_LEVELS || 0;
}
