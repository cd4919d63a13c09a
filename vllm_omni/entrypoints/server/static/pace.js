// How fast to play, so that pictures neither run out nor wait longer than they must.
//
// A chunk's lateness is its time of arrival minus its place in the stream. The distance between
// the clock and the playback position has to stay above the lateness of the chunks to come, and
// every bit above that is a delay between a key and its picture.

const KEPT = 16;
const MIN_SPARE_S = 0.12;
const FASTEST = 1.15;
const SLOWEST = 0.75;
const SPEED_UP_OVER_S = 2;
const SLOW_DOWN_OVER_S = 1;
const UNNOTICED = 0.02;
const CHUNKS_TO_BEGIN = 2;

export class Pace {
  #leadS;
  #chunks = 0;
  #chunkS = 0;
  #lateness = [];

  /** @param {number} leadS how much video the server makes ahead */
  constructor(leadS) {
    this.#leadS = leadS;
  }

  /** A chunk of `durationS` that starts at `mediaS` of the stream came at `nowS`. */
  arrived(nowS, mediaS, durationS) {
    this.#chunks += 1;
    this.#chunkS = durationS;
    // The first chunk is late or early against itself alone.
    if (this.#chunks === 1) return;
    this.#lateness = [...this.#lateness.slice(1 - KEPT), nowS - mediaS];
  }

  /** Whether playback that begins now will find the next chunk in time. */
  get ready() {
    return this.#chunks >= CHUNKS_TO_BEGIN;
  }

  /** Playback rate for now, at `positionS` of the stream. */
  rate(nowS, positionS) {
    const spare = this.#spare(nowS, positionS);
    if (spare === null) return 1;
    // The buffer goes up and down by a chunk: the lead is its middle.
    const wanted = Math.max(MIN_SPARE_S, this.#leadS - this.#chunkS / 2);
    if (spare > wanted) return near(1 + Math.min(FASTEST - 1, (spare - wanted) / SPEED_UP_OVER_S));
    if (spare > MIN_SPARE_S) return 1;
    return near(1 + Math.max(SLOWEST - 1, (spare - MIN_SPARE_S) / SLOW_DOWN_OVER_S));
  }

  /** Seconds of playback that are more than the lead and a chunk, or 0. */
  surplus(nowS, positionS) {
    return Math.max(0, (this.#spare(nowS, positionS) ?? 0) - this.#leadS);
  }

  /** Seconds that would be left when the next chunk came, if it came as late as chunks do here. */
  #spare(nowS, positionS) {
    if (!this.#lateness.length) return null;
    return nowS - positionS - this.#expectedLateness();
  }

  /** The worst of the last chunks but one, for one bad chunk is no rule, and where that leads. */
  #expectedLateness() {
    const sorted = [...this.#lateness].sort((a, b) => b - a);
    return (sorted[1] ?? sorted[0]) + 2 * this.#growth();
  }

  /** Seconds by which chunks come later from one to the next, where the server cannot keep up. */
  #growth() {
    const half = Math.floor(this.#lateness.length / 2);
    if (half < 2) return 0;
    const earlier = mean(this.#lateness.slice(0, half));
    const later = mean(this.#lateness.slice(-half));
    return Math.max(0, (later - earlier) / (this.#lateness.length - half));
  }
}

function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}

function near(rate) {
  return Math.abs(rate - 1) < UNNOTICED ? 1 : rate;
}
