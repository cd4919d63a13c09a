// The world on the screen: the video, or where it cannot be played single pictures of it.

import { Player } from "./player.js";
import { Stills } from "./stills.js";
import * as view from "./view.js";

const { dom } = view;

export class Screen {
  #player;
  #stills = new Stills(dom.still);
  #hasVideo = false;

  /** @param {() => void} newTimeline called when media time begins again at zero */
  constructor(newTimeline) {
    this.#player = new Player(dom.video, {
      unsupported: (init) => this.#withoutVideo(init),
      stall: (reason) => view.log(`Playback restarted: ${reason}.`),
      opened: () => {
        newTimeline();
        view.freeze();
        this.#hasVideo = false;
      },
    });
  }

  /** Wait for a new stream. */
  start(options) {
    this.#stills.stop();
    this.#hasVideo = false;
    this.#player.start(options);
    view.showLayer("poster");
  }

  /** Show a chunk; returns the media time of its first picture, or null if it is not played. */
  push(bytes, pixelFrames) {
    const mediaTime = this.#player.push(bytes, pixelFrames);
    if (mediaTime === null) this.#stills.push(bytes);
    else this.#showVideo();
    return mediaTime;
  }

  /** Begin anew with the next chunk. */
  restart() {
    this.#player.restart();
  }

  /** Leave the last picture on the screen. */
  stop() {
    this.#player.stop();
  }

  whenShown(mediaTime, callback) {
    this.#player.whenShown(mediaTime, callback);
  }

  /** Whether every picture that came has been shown. */
  get isDry() {
    return this.#hasVideo && this.#player.isDry;
  }

  /** Seconds that can be played without another chunk, or null. */
  get bufferedSeconds() {
    return this.#hasVideo ? this.#player.bufferedSeconds : null;
  }

  /** Media time of the picture on the screen, or null. */
  get time() {
    return this.#hasVideo ? this.#player.time : null;
  }

  #showVideo() {
    if (this.#hasVideo) return;
    this.#hasVideo = true;
    dom.video.addEventListener("loadeddata", () => view.showLayer("video"), { once: true });
  }

  async #withoutVideo(init) {
    const stills = await this.#stills.start(init).catch(() => false);
    const what = stills ? "one picture of each chunk is shown" : "only the first picture is shown";
    view.showNotice(
      `This browser cannot play H.264 video, so ${what}. The world goes on; Save keeps it.`,
    );
    view.log("No H.264 playback in this browser.", { bad: true });
    if (stills) view.showLayer("still");
  }
}
