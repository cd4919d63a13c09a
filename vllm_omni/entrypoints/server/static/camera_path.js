// The camera's path, rebuilt from the events that each chunk says it applied: what is on the
// screen, what has arrived but is not shown yet, and where what was sent will lead.

import { Pose, STILL } from "./motion.js";

const LATENT_FRAMES = 3;
const KEPT_POINTS = 6000;
const AHEAD_FRAMES = 6;

export class CameraPath {
  #sent = new Map();
  #velocity = STILL;
  #points = [];
  #shown = 0;

  constructor() {
    this.restart();
  }

  /** Forget the path: a new world starts at rest. Velocities on their way stay known. */
  restart() {
    this.#velocity = STILL;
    this.pose = new Pose();
    this.#points = [{ x: 0, z: 0, heading: 0, pitch: 0, shownAt: 0 }];
    this.#shown = 0;
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

  /** An event was refused. */
  forget(eventId) {
    this.#sent.delete(eventId);
  }

  /** Advance by one chunk, whose first picture has this media time; null if it is not played. */
  chunk(metadata, mediaTime, fps) {
    const started = metadata.started_event_ids ?? [];
    for (let latentFrame = 0; latentFrame < LATENT_FRAMES; latentFrame += 1) {
      this.#apply(started.filter((id) => latentFrameInChunk(metadata, id) === latentFrame));
      this.pose.advance(this.#velocity);
      const before = pixelFramesBefore(latentFrame, metadata.num_frames) / fps;
      this.#add(mediaTime === null ? 0 : mediaTime + before);
    }
  }

  /** The picture of this media time is on the screen; returns whether the camera has moved on. */
  shown(mediaTime) {
    const before = this.#shown;
    while (this.#points[this.#shown + 1]?.shownAt <= mediaTime) this.#shown += 1;
    return this.#shown !== before;
  }

  /** Whatever has arrived counts as shown: media time begins anew. */
  allShown() {
    this.#shown = this.#points.length - 1;
  }

  /** Points up to the one on the screen. */
  get walked() {
    return this.#points.slice(0, this.#shown + 1);
  }

  /** Points from the one on the screen on: arrived, and expected of what was sent. */
  get ahead() {
    const arrived = this.#points.slice(this.#shown);
    const next = [...this.#sent.values()].at(-1);
    if (!next) return arrived;
    const pose = Object.assign(new Pose(), { ...this.pose });
    const expected = Array.from({ length: AHEAD_FRAMES }, () => {
      pose.advance(next);
      return pointOf(pose, Infinity);
    });
    return [...arrived, ...expected];
  }

  #add(shownAt) {
    this.#points.push(pointOf(this.pose, shownAt));
    if (this.#points.length <= KEPT_POINTS) return;
    // Every second one of those that were shown goes, but never the one on the screen.
    const kept = this.walked.filter((_, index) => (this.#shown - index) % 2 === 0);
    this.#points = [...kept, ...this.#points.slice(this.#shown + 1)];
    this.#shown = kept.length - 1;
  }

  #apply(eventIds) {
    for (const id of eventIds) {
      const velocity = this.#sent.get(id);
      if (!velocity) continue;
      this.#velocity = velocity;
      forgetUpTo(this.#sent, id);
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

/** Drop an event and those that were sent before it: the newest one counts. */
export function forgetUpTo(events, eventId) {
  for (const id of [...events.keys()]) {
    events.delete(id);
    if (id === eventId) return;
  }
}

function pointOf(pose, shownAt) {
  const [x, , z] = pose.position;
  return { x, z, heading: pose.heading, pitch: pose.pitch, shownAt };
}
