// Drags on the picture: each is a stick that stands where the pointer went down.
//
// A mouse looks around. Fingers walk on the left half of the picture and look on the right one.

const RADIUS = 72;
const DEAD = 10;
const LEVELS = 5;

export class Drags {
  #stage;
  #held = new Map();
  #changed;

  /**
   * @param {HTMLElement} stage
   * @param {{enabled: () => boolean, changed: () => void}} callbacks
   */
  constructor(stage, { enabled, changed }) {
    this.#stage = stage;
    this.#changed = changed;
    stage.addEventListener("pointerdown", (event) => {
      if (enabled() && event.button === 0 && !event.target.closest("button")) this.#begin(event);
    });
    stage.addEventListener("pointermove", (event) => this.#move(event));
    for (const kind of ["pointerup", "pointercancel", "lostpointercapture"]) {
      stage.addEventListener(kind, ({ pointerId }) => this.#end(pointerId));
    }
    stage.addEventListener("dragstart", (event) => event.preventDefault());
  }

  /** Directions in [-1, 1] of every drag. */
  get axes() {
    return [...this.#held.values()].map(({ walks, x, y }) =>
      walks ? { right: x, forward: -y } : { yaw: x, pitch: -y },
    );
  }

  /** Let go of every drag. */
  release() {
    for (const id of this.#held.keys()) this.#end(id);
  }

  #begin({ pointerId, pointerType, clientX, clientY }) {
    const box = this.#stage.getBoundingClientRect();
    const walks = pointerType !== "mouse" && clientX < box.left + box.width / 2;
    this.#stage.setPointerCapture(pointerId);
    const mark = document.createElement("i");
    mark.className = "stick";
    mark.hidden = true;
    mark.style.translate = `${clientX - box.left}px ${clientY - box.top}px`;
    this.#stage.append(mark);
    this.#held.set(pointerId, { walks, from: [clientX, clientY], x: 0, y: 0, mark });
  }

  #move({ pointerId, clientX, clientY }) {
    const drag = this.#held.get(pointerId);
    if (!drag) return;
    const [dx, dy] = [clientX - drag.from[0], clientY - drag.from[1]];
    const [x, y] = [level(dx), level(dy)];
    drag.mark.hidden = false;
    drag.mark.style.setProperty("--x", `${Math.max(-RADIUS, Math.min(RADIUS, dx))}px`);
    drag.mark.style.setProperty("--y", `${Math.max(-RADIUS, Math.min(RADIUS, dy))}px`);
    if (x === drag.x && y === drag.y) return;
    Object.assign(drag, { x, y });
    this.#changed();
  }

  #end(pointerId) {
    const drag = this.#held.get(pointerId);
    if (!drag) return;
    this.#held.delete(pointerId);
    drag.mark.remove();
    if (drag.x || drag.y) this.#changed();
  }
}

/** A distance in a few levels, so that a trembling hand sends nothing. */
function level(distance) {
  const beyond = Math.min(1, Math.max(0, Math.abs(distance) - DEAD) / (RADIUS - DEAD));
  return (Math.sign(distance) * Math.ceil(beyond * LEVELS)) / LEVELS || 0;
}
