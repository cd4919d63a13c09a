// The camera's path, rebuilt from the events that each chunk says it applied.

import { Pose, STILL } from "./motion.js";

const LATENT_FRAMES = 3;
const KEPT_POINTS = 6000;

export class CameraPath {
  #sent = new Map();
  #velocity = STILL;

  constructor() {
    this.restart();
  }

  /** Forget the path: a new world starts at rest. Velocities on their way stay known. */
  restart() {
    this.#velocity = STILL;
    this.pose = new Pose();
    this.points = [[0, 0]];
  }

  /** Forget everything: a new session has no events. */
  clear() {
    this.#sent.clear();
    this.restart();
  }

  /** Remember what an event will do once it is applied. */
  sent(eventId, velocity) {
    this.#sent.set(eventId, velocity);
  }

  /** Advance by one chunk. */
  chunk(metadata) {
    const started = metadata.started_event_ids ?? [];
    for (let latentFrame = 0; latentFrame < LATENT_FRAMES; latentFrame += 1) {
      this.#apply(started.filter((id) => latentFrameInChunk(metadata, id) === latentFrame));
      this.pose.advance(this.#velocity);
      const [x, , z] = this.pose.position;
      this.points.push([x, z]);
    }
    if (this.points.length > KEPT_POINTS) this.points = this.points.filter((_, i) => i % 2 === 0);
  }

  #apply(eventIds) {
    for (const id of eventIds) {
      const velocity = this.#sent.get(id);
      if (velocity) this.#velocity = velocity;
      this.#sent.delete(id);
    }
  }
}

/** Latent frame of its chunk at which an event took effect. */
export function latentFrameInChunk({ applied, generation_chunk_index: index }, eventId) {
  const inRollout = applied?.[eventId];
  if (inRollout === undefined || index === null) return 0;
  return Math.min(LATENT_FRAMES - 1, Math.max(0, inRollout - LATENT_FRAMES * index));
}

/** Pixel frames of a chunk that come before latent frame `latentFrame` of it. */
export function pixelFramesBefore(latentFrame, chunkFrames) {
  if (latentFrame === 0) return 0;
  const first = chunkFrames - 4 * (LATENT_FRAMES - 1);
  return first + 4 * (latentFrame - 1);
}
