// Sends the camera's velocity whenever it changes, and follows each one until it is on the screen.

import { forgetUpTo, latentFrameInChunk, pixelFramesBefore } from "./camera_path.js";
import { velocityOf } from "./motion.js";

const RETRY_MS = 250;
const REST = JSON.stringify(velocityOf({ forward: 0, right: 0, yaw: 0, pitch: 0 }));

export class Steering {
  #controls;
  #path;
  #session = null;
  #sent = REST;
  #onTheWay = new Map();

  constructor(controls, path) {
    this.#controls = controls;
    this.#path = path;
  }

  /** Steer this session from now on; what is held already counts. */
  attach(session) {
    this.#session = session;
    this.#sent = REST;
    this.#onTheWay.clear();
    this.update();
  }

  /** The world started over, at rest: what is held counts from now on. */
  restart() {
    this.#path.restart();
    this.#sent = null;
    this.update();
  }

  /** Directions that were asked for and are not on the screen yet. */
  get onTheWay() {
    return [...this.#onTheWay.values()].map(({ axes }) => axes);
  }

  /** Send the velocity of what is held now, if it is not what was sent last. */
  update() {
    const { axes } = this.#controls;
    const velocity = velocityOf(axes, this.#path.pose.pitch);
    const text = JSON.stringify(velocity);
    if (text === this.#sent) return;
    const id = this.#session?.camera(velocity) ?? null;
    if (id === null) return;
    this.#sent = text;
    this.#path.sent(id, velocity);
    this.#onTheWay.set(id, { axes, sentAt: performance.now() });
  }

  /** The server did not take a camera event: send the present state again. Returns whether it was one. */
  refused(eventId) {
    if (!this.#onTheWay.delete(eventId)) return false;
    this.#path.forget(eventId);
    this.#sent = null;
    setTimeout(() => this.update(), RETRY_MS);
    return true;
  }

  /** Events that this chunk shows: `{id, pixelFrame, sentAt}`, the newest last. */
  shownBy(metadata) {
    const started = (metadata.started_event_ids ?? []).filter((id) => this.#onTheWay.has(id));
    return started.map((id) => ({
      id,
      pixelFrame: pixelFramesBefore(latentFrameInChunk(metadata, id), metadata.num_frames),
      sentAt: this.#onTheWay.get(id).sentAt,
    }));
  }

  /** An event is on the screen, and with it all that were sent before. */
  seen(eventId) {
    if (this.#onTheWay.has(eventId)) forgetUpTo(this.#onTheWay, eventId);
  }

  /** Whatever was on its way to the screen is there, or never will be. */
  allSeen() {
    this.#onTheWay.clear();
  }
}
