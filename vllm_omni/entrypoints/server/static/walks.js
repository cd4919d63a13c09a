// Keeps the video of this walk and of earlier ones, so that each can be saved as one MP4.

import { decodeTime, earlier, initSegment } from "./fmp4.js";

const LIMIT_BYTES = 2 ** 30;
const MAX_WALKS = 20;

/** The chunks of one world, from its start or reset to its end. */
class Walk {
  #parts = [];
  #startTicks = null;
  bytes = 0;
  seconds = 0;
  begun = new Date();

  constructor(name, init) {
    this.name = name;
    if (init) this.#parts.push(new Blob([init]));
  }

  push(buffer, seconds) {
    // After a reset the stream's clock goes on; the saved file starts at zero.
    this.#startTicks ??= decodeTime(buffer);
    this.#parts.push(new Blob([earlier(buffer, this.#startTicks)]));
    this.bytes += buffer.byteLength;
    this.seconds += seconds;
  }

  get blob() {
    return new Blob(this.#parts, { type: "video/mp4" });
  }

  get fileName() {
    const stamp = new Date(this.begun - 60_000 * this.begun.getTimezoneOffset()).toISOString();
    return `lingbot-world-${stamp.slice(0, 19).replaceAll(/[:T]/g, "-")}.mp4`;
  }
}

export class Walks {
  #walks = [];
  #init = null;
  #current = null;
  /** Whether the limit of one GiB is reached, so that the present walk is no longer kept. */
  full = false;

  /** A new world begins; `newStream` if its video starts with an init segment of its own. */
  begin(name, { newStream }) {
    if (newStream) this.#init = null;
    this.#current = new Walk(name, this.#init);
    this.#walks = [this.#current, ...this.offered].slice(0, MAX_WALKS);
    this.full = false;
  }

  /** Keep a chunk; earlier walks make room for it, the oldest first. Returns what was dropped. */
  push(buffer, seconds) {
    const init = initSegment(buffer);
    if (init && this.#init) this.#current = this.#walks[0] = new Walk(this.#current.name, null);
    if (init) this.#init = init;
    const dropped = [];
    while (this.#bytes + buffer.byteLength > LIMIT_BYTES && this.#walks.length > 1) {
      dropped.push(this.#walks.pop());
    }
    this.full ||= this.#bytes + buffer.byteLength > LIMIT_BYTES;
    if (!this.full) this.#current.push(buffer, seconds);
    return dropped;
  }

  /** Walks that can be saved, the newest first. */
  get offered() {
    return this.#walks.filter(({ bytes }) => bytes > 0);
  }

  get #bytes() {
    return this.#walks.reduce((sum, walk) => sum + walk.bytes, 0);
  }
}

/** Hand a walk to the browser's downloads. */
export function save(walk) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(walk.blob);
  link.download = walk.fileName;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}
