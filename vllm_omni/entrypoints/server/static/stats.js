// Figures of the running session, from arrival times alone.

const KEPT = 90;
const RATE_OVER = 8;

export class Stats {
  constructor() {
    this.clear();
  }

  clear() {
    this.intervals = [];
    this.firstChunkMs = null;
    this.delaysMs = [];
    this.chunks = 0;
    this.pixelFrames = 0;
    this.lateChunks = 0;
    this.#startedAt = null;
    this.#lastAt = null;
  }

  #startedAt;
  #lastAt;

  /** The clock of the first chunk starts now. */
  begin(now) {
    this.#startedAt = now;
  }

  /** A chunk has arrived; late, if every picture before it had been shown. */
  chunk(now, pixelFrames, { fps, late }) {
    if (this.#lastAt === null) this.firstChunkMs = now - this.#startedAt;
    else this.#interval(now, pixelFrames, { fps, late });
    this.#lastAt = now;
    this.chunks += 1;
    this.pixelFrames += pixelFrames;
  }

  /** A control has reached the screen. */
  shown(delayMs) {
    this.delaysMs = [...this.delaysMs.slice(-24), delayMs];
  }

  /** Milliseconds between the last two chunks, or null. */
  get intervalMs() {
    return this.intervals.at(-1)?.ms ?? null;
  }

  /** Pixel frames per second over the last chunks, or null. */
  get rate() {
    const last = this.intervals.slice(-RATE_OVER);
    const ms = last.reduce((sum, entry) => sum + entry.ms, 0);
    return ms ? (1000 * last.reduce((sum, entry) => sum + entry.pixelFrames, 0)) / ms : null;
  }

  /** Median delay from a control to the screen, or null. */
  get delayMs() {
    const sorted = [...this.delaysMs].sort((a, b) => a - b);
    return sorted.length ? sorted[Math.floor(sorted.length / 2)] : null;
  }

  #interval(now, pixelFrames, { fps, late }) {
    const entry = { ms: now - this.#lastAt, deadlineMs: (1000 * pixelFrames) / fps, pixelFrames, late };
    if (late) this.lateChunks += 1;
    this.intervals = [...this.intervals.slice(1 - KEPT), entry];
  }
}
