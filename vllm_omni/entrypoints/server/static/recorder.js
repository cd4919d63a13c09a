// Keeps the bytes of the current world so that they can be saved as one MP4.

import { decodeTime, earlier, initSegment } from "./fmp4.js";

const LIMIT_BYTES = 2 ** 30;

export class Recorder {
  #parts = [];
  #init = null;
  #startTicks = null;
  bytes = 0;
  full = false;

  /** Forget everything: a new session. */
  clear() {
    this.#init = null;
    this.restart();
  }

  /** Start a new file: the world was reset. */
  restart() {
    this.#parts = [];
    this.#startTicks = null;
    this.bytes = 0;
    this.full = false;
  }

  /** Keep a chunk; false once the limit is reached. */
  push(buffer) {
    const init = initSegment(buffer);
    if (init) {
      this.#init = init;
      this.restart();
    } else if (!this.#parts.length && this.#init) {
      this.#parts.push(new Blob([this.#init]));
    }
    // After a reset the stream's clock goes on; the saved file starts at zero.
    this.#startTicks ??= decodeTime(buffer);
    if (this.bytes + buffer.byteLength > LIMIT_BYTES) this.full = true;
    if (this.full) return false;
    this.#parts.push(new Blob([earlier(buffer, this.#startTicks)]));
    this.bytes += buffer.byteLength;
    return true;
  }

  /** Hand the file to the browser's downloads. */
  save(name) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob(this.#parts, { type: "video/mp4" }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  }
}
