// Plays the stream as it arrives: bounded buffer, as close to the live edge as Pace allows,
// recovers from stalls.

import { codecName, decoderConfig, initSegment } from "./fmp4.js";
import { Pace } from "./pace.js";

const TICK_MS = 200;
const KEEP_BEHIND_S = 4;
const TRIM_BEHIND_S = 10;
const STALL_NUDGE_MS = 1500;
const STALL_REBUILD_MS = 5000;
const JUMP_OVER_S = 2;
const LAST_PICTURE_S = 0.02;
const MAX_QUEUE = 64;

/** The browser's Media Source class, or null (an iPhone has the managed kind only). */
function mediaSourceClass() {
  return globalThis.MediaSource ?? globalThis.ManagedMediaSource ?? null;
}

export class Player {
  #video;
  #callbacks;
  #fps = 16;
  #leadS = 1;
  #pace = new Pace(1);
  #init = null;
  #source = null;
  #buffer = null;
  #queue = [];
  #url = null;
  #framesQueued = 0;
  #waiting = [];
  #progress = { time: -1, since: 0 };
  #timer = null;
  #needsInit = false;
  #stale = false;
  #watching = false;

  /**
   * @param {HTMLVideoElement} video
   * @param {{unsupported: (init: ArrayBuffer) => void, opened: () => void,
   *          stall: (text: string) => void}} callbacks; `opened`: a new timeline begins at zero
   */
  constructor(video, callbacks) {
    this.#video = video;
    this.#callbacks = callbacks;
    video.addEventListener("error", () => this.#rebuild("the player failed"));
  }

  /** Wait for a new stream. */
  start({ fps, leadMs }) {
    this.stop();
    this.#fps = fps;
    this.#leadS = leadMs / 1000;
    this.#timer = setInterval(() => this.#tick(), TICK_MS);
  }

  /** Drop what is buffered as soon as the next chunk comes, and begin anew with that. */
  restart() {
    this.#stale = true;
  }

  /** Show the last picture and take no more. */
  stop() {
    clearInterval(this.#timer);
    this.#timer = null;
    this.#init = null;
    this.#stale = false;
    this.#queue = [];
    this.#waiting = [];
    this.#video.pause();
  }

  /** Append one chunk; returns the media time of its first picture, or null when not played. */
  push(bytes, pixelFrames) {
    const init = initSegment(bytes);
    if (init && !this.#accept(init)) return null;
    if (!this.#source) return null;
    if (this.#stale) this.#open();
    if (this.#needsInit && !init) this.#enqueue(this.#init);
    this.#needsInit = false;
    const start = this.#framesQueued / this.#fps;
    this.#framesQueued += pixelFrames;
    this.#pace.arrived(performance.now() / 1000, start, pixelFrames / this.#fps);
    this.#enqueue(bytes);
    return start;
  }

  /** Call back once the picture at this media time is on the screen. */
  whenShown(mediaTime, callback) {
    this.#waiting.push({ mediaTime, callback });
    this.#watchFrames();
  }

  /** Seconds that can be played without another chunk. */
  get bufferedSeconds() {
    return Math.max(0, this.#end() - this.#video.currentTime);
  }

  /** Whether every picture that came has been shown. */
  get isDry() {
    return this.#pace.ready && this.bufferedSeconds < LAST_PICTURE_S + 1 / this.#fps;
  }

  get time() {
    return this.#video.currentTime;
  }

  #accept(init) {
    const known = this.#init !== null;
    this.#init = init;
    const mime = `video/mp4; codecs="${codecName(decoderConfig(init))}"`;
    if (!mediaSourceClass()?.isTypeSupported(mime)) {
      this.#source = null;
      this.#callbacks.unsupported(init);
      return false;
    }
    if (!known) this.#open();
    return true;
  }

  #open() {
    this.#callbacks.opened();
    this.#close();
    const source = new (mediaSourceClass())();
    this.#source = source;
    this.#needsInit = true;
    this.#stale = false;
    this.#framesQueued = 0;
    this.#pace = new Pace(this.#leadS);
    this.#progress = { time: -1, since: performance.now() };
    this.#video.pause();
    this.#video.disableRemotePlayback = true;
    this.#url = URL.createObjectURL(source);
    this.#video.src = this.#url;
    source.addEventListener("sourceopen", () => this.#attach(source), { once: true });
  }

  #attach(source) {
    // The world may have ended before the source was open.
    if (source !== this.#source || !this.#init) return;
    const buffer = source.addSourceBuffer(
      `video/mp4; codecs="${codecName(decoderConfig(this.#init))}"`,
    );
    // One timeline for everything appended, also across a reset that counts from zero again.
    buffer.mode = "sequence";
    buffer.addEventListener("updateend", () => this.#pump());
    this.#buffer = buffer;
    this.#pump();
  }

  #close() {
    if (this.#url) URL.revokeObjectURL(this.#url);
    this.#url = null;
    this.#buffer = null;
    this.#queue = [];
    this.#waiting = [];
  }

  #enqueue(bytes) {
    if (this.#queue.length >= MAX_QUEUE) {
      this.#rebuild("the player fell behind");
      return;
    }
    this.#queue.push(bytes);
    this.#pump();
  }

  #pump() {
    if (!this.#buffer || this.#buffer.updating || this.#source.readyState !== "open") return;
    if (this.#trim()) return;
    const bytes = this.#queue.shift();
    if (!bytes) {
      this.#play();
      return;
    }
    try {
      this.#buffer.appendBuffer(bytes);
    } catch (error) {
      this.#appendFailed(error, bytes);
    }
  }

  #appendFailed(error, bytes) {
    if (error.name === "QuotaExceededError" && this.#trim(KEEP_BEHIND_S / 4)) {
      this.#queue.unshift(bytes);
      return;
    }
    this.#rebuild("the player refused a chunk");
  }

  #trim(behind = TRIM_BEHIND_S) {
    const { buffered, currentTime } = this.#video;
    const keepFrom = currentTime - Math.min(behind, KEEP_BEHIND_S);
    if (!buffered.length || buffered.start(0) > currentTime - behind) return false;
    this.#buffer.remove(0, keepFrom);
    return true;
  }

  #play() {
    if (this.#timer && this.#pace.ready && this.#video.paused) this.#video.play().catch(() => {});
  }

  #end() {
    const { buffered } = this.#video;
    return buffered.length ? buffered.end(buffered.length - 1) : 0;
  }

  #tick() {
    if (!this.#source || !this.#video.buffered.length) return;
    this.#pump();
    this.#keepPace();
    this.#watchStall();
  }

  #keepPace() {
    const video = this.#video;
    const now = performance.now() / 1000;
    const start = video.buffered.start(0);
    if (video.currentTime < start) video.currentTime = start;
    else if (this.#pace.surplus(now, video.currentTime) > JUMP_OVER_S) {
      video.currentTime = this.#end() - Math.max(this.#leadS, 0.25);
    }
    const rate = this.#pace.rate(now, video.currentTime);
    if (video.playbackRate !== rate) video.playbackRate = rate;
  }

  #watchStall() {
    const now = performance.now();
    const time = this.#video.currentTime;
    const waits = this.bufferedSeconds < 0.3 || document.hidden || !this.#pace.ready;
    if (time !== this.#progress.time || waits) {
      this.#progress = { time, since: now };
      return;
    }
    const stalledMs = now - this.#progress.since;
    this.#play();
    if (stalledMs > STALL_REBUILD_MS) this.#rebuild("playback stalled");
    else if (stalledMs > STALL_NUDGE_MS) this.#video.currentTime = time + 0.05;
  }

  #rebuild(reason) {
    if (!this.#init || !this.#source || !this.#timer) return;
    this.#callbacks.stall(reason);
    this.#open();
  }

  #watchFrames() {
    if (this.#watching) return;
    this.#watching = true;
    const look = (mediaTime) => {
      const due = this.#waiting.filter((entry) => mediaTime >= entry.mediaTime - 0.001);
      this.#waiting = this.#waiting.filter((entry) => !due.includes(entry));
      for (const entry of due) entry.callback();
      this.#watching = this.#waiting.length > 0;
      if (this.#watching) this.#nextFrame(look);
    };
    this.#nextFrame(look);
  }

  #nextFrame(look) {
    if ("requestVideoFrameCallback" in this.#video) {
      this.#video.requestVideoFrameCallback((_, frame) => look(frame.mediaTime));
    } else {
      requestAnimationFrame(() => look(this.#video.currentTime));
    }
  }
}
