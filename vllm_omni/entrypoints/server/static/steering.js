// Sends the camera's velocity whenever it changes, and measures how long it takes to be seen.

import { latentFrameInChunk, pixelFramesBefore } from "./camera_path.js";
import { velocityOf } from "./motion.js";

const RETRY_MS = 250;
const REST = JSON.stringify(velocityOf({ forward: 0, right: 0, yaw: 0, pitch: 0 }));

export class Steering {
  #controls;
  #path;
  #session = null;
  #sent = REST;
  #sentAt = new Map();

  constructor(controls, path) {
    this.#controls = controls;
    this.#path = path;
  }

  /** Steer this session from now on; what is held already counts. */
  attach(session) {
    this.#session = session;
    this.#sent = REST;
    this.#sentAt.clear();
    this.update();
  }

  /** The world started over, at rest: what is held counts from now on. */
  restart() {
    this.#path.restart();
    this.#sent = null;
    this.update();
  }

  /** Send the velocity of what is held now, if it is not what was sent last. */
  update() {
    const velocity = velocityOf(this.#controls.axes, this.#path.pose.pitch);
    const text = JSON.stringify(velocity);
    if (text === this.#sent) return;
    const id = this.#session?.camera(velocity) ?? null;
    if (id === null) return;
    this.#sent = text;
    this.#path.sent(id, velocity);
    this.#sentAt.set(id, performance.now());
  }

  /** The server did not take a camera event: send the present state again. */
  refused(eventId) {
    if (!this.#sentAt.delete(eventId)) return;
    this.#sent = null;
    setTimeout(() => this.update(), RETRY_MS);
  }

  /** Follow a chunk; calls `due(pixelFrame, sentAt)` for the newest event that it shows. */
  chunk(metadata, due) {
    this.#path.chunk(metadata);
    const started = (metadata.started_event_ids ?? []).filter((id) => this.#sentAt.has(id));
    const newest = started.at(-1);
    if (newest) {
      const latentFrame = latentFrameInChunk(metadata, newest);
      due(pixelFramesBefore(latentFrame, metadata.num_frames), this.#sentAt.get(newest));
    }
    for (const id of started) this.#sentAt.delete(id);
    // The velocity of a turn depends on how far the camera looks up, which has just changed.
    this.update();
  }
}
