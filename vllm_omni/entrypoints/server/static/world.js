// One world after the other: its session, what of it is on the screen, where the camera is, and
// the recording.

import { CameraPath } from "./camera_path.js";
import { Controls, directionsOf } from "./controls.js";
import { showFigures, showIntervals, showMap } from "./live.js";
import { Screen } from "./screen.js";
import { Session, socketUrl } from "./session.js";
import { Stats } from "./stats.js";
import { Steering } from "./steering.js";
import * as view from "./view.js";
import { Walks } from "./walks.js";

const { dom } = view;
const REFRESH_MS = 100;
const SHOWN_ID_LENGTH = 21;

export class World {
  walks = new Walks();
  #stats = new Stats();
  #path = new CameraPath();
  #screen = new Screen(() => this.#newTimeline());
  #controls;
  #steering;
  #session = null;
  #callbacks;
  #position = null;
  #promptId = null;
  #fps = 16;
  #nextName = "";

  /**
   * @param {{walking: () => boolean, fullScreen: () => void, state: (name: string) => void,
   *          queued: (position: number) => void, refused: (error: object) => void,
   *          ended: (result: object) => void}} callbacks
   */
  constructor(callbacks) {
    this.#callbacks = callbacks;
    this.#controls = new Controls(
      { pads: dom.scene, stage: dom.stage },
      {
        enabled: callbacks.walking,
        changed: () => this.#steered(),
        fullScreen: callbacks.fullScreen,
      },
    );
    this.#steering = new Steering(this.#controls, this.#path);
    setInterval(() => this.#refresh(), REFRESH_MS);
    new ResizeObserver(() => this.#drawMap()).observe(dom.path);
    new ResizeObserver(() => this.#drawIntervals()).observe(dom.intervals);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.#drawIntervals();
    });
  }

  /** Whether there is a world, or one on its way. */
  get lives() {
    return this.#session !== null;
  }

  /** Whether it can be steered now. */
  get open() {
    return this.#session?.open ?? false;
  }

  /** Place in the line, or null. */
  get position() {
    return this.#position;
  }

  /** Whether somebody has seen anything of it. */
  get hasPictures() {
    return this.lives && this.#stats.chunks > 0;
  }

  /** Start a world with the fields of a start message. */
  begin(name, fields, subprotocols) {
    this.#fps = fields.fps;
    this.#position = null;
    this.#promptId = null;
    this.#stats.clear();
    this.#stats.begin(performance.now());
    this.#path.clear();
    this.walks.begin(name, { newStream: true });
    for (const control of [dom.save, dom.clock]) control.hidden = false;
    dom.save.disabled = !this.walks.offered.length;
    view.showPromptStep(null);
    this.#screen.start({ fps: fields.fps, leadMs: fields.max_lead_ms });
    const url = socketUrl("v1/realtime/video");
    this.#session = new Session(url, subprotocols, fields, this.#listeners());
    view.log(`Start: ${name}, ${fields.width} x ${fields.height}, seed ${fields.seed}.`);
    this.#draw();
  }

  /** Start over with the fields of a reset message. */
  reset(name, fields) {
    this.#nextName = name;
    this.#session?.reset(fields);
  }

  stop() {
    this.#session?.stop();
  }

  /** Blend to another prompt over so many chunks. */
  prompt(text, transitionChunks) {
    this.#promptId = this.#session?.prompt(text, transitionChunks) ?? null;
    view.showPromptStep(null);
    if (this.#promptId) view.log(`Prompt: “${text}”`);
  }

  #listeners() {
    return {
      state: (state) => this.#callbacks.state(state),
      queued: (position) => {
        this.#position = position;
        this.#callbacks.queued(position);
      },
      started: (message) => this.#started(message),
      chunk: (metadata, bytes) => this.#chunk(metadata, bytes),
      interaction: (id, status, error) => this.#interaction(id, status, error),
      reset: () => this.#wasReset(),
      refused: (error) => view.log(error.message, { bad: true }),
      ended: (result) => this.#ended(result),
    };
  }

  #started({ request_id: requestId }) {
    if (this.#position !== null) this.#stats.begin(performance.now());
    this.#position = null;
    view.log(`Accepted as ${requestId.slice(0, SHOWN_ID_LENGTH)}.`);
    this.#steering.attach(this.#session);
  }

  #chunk(metadata, bytes) {
    const { num_frames: pixelFrames } = metadata;
    const late = this.#screen.isDry;
    this.#stats.chunk(performance.now(), pixelFrames, { fps: this.#fps, late });
    const mediaTime = this.#screen.push(bytes, pixelFrames);
    const events = this.#steering.shownBy(metadata);
    this.#path.chunk(metadata, mediaTime, this.#fps);
    events.forEach((event, index) => {
      this.#whenShown(event, mediaTime, index === events.length - 1);
    });
    // The velocity of a turn depends on how far the camera looks up, which has just changed.
    this.#steering.update();
    this.#record(bytes, pixelFrames / this.#fps);
    this.#draw();
  }

  #whenShown({ id, pixelFrame, sentAt }, mediaTime, isNewest) {
    if (mediaTime === null) {
      this.#steering.seen(id);
      return;
    }
    this.#screen.whenShown(mediaTime + pixelFrame / this.#fps, () => {
      if (isNewest) this.#stats.shown(performance.now() - sentAt);
      this.#steering.seen(id);
      this.#showPads();
    });
  }

  #record(bytes, seconds) {
    const wasFull = this.walks.full;
    for (const { name } of this.walks.push(bytes, seconds)) {
      view.log(`The oldest walk (${name}) made room; 1 GiB of walks is kept.`);
    }
    dom.save.disabled = false;
    if (this.walks.full && !wasFull) {
      view.log("The recording has reached 1 GiB; later chunks are not in it.");
    }
  }

  #interaction(id, status, error) {
    const isPrompt = id === this.#promptId;
    if (status === "refused") {
      view.log(error.message, { bad: true });
      // A camera event is sent again by itself.
      if (!this.#steering.refused(id)) this.#callbacks.refused(error);
    } else if (isPrompt) {
      view.log(`Prompt ${status}.`);
    }
    if (isPrompt) view.showPromptStep(status);
  }

  #wasReset() {
    view.log(`${this.#nextName} starts over.`);
    this.walks.begin(this.#nextName, { newStream: false });
    this.#steering.restart();
    this.#screen.restart();
    this.#draw();
  }

  #ended(result) {
    this.#session = null;
    this.#position = null;
    this.#screen.stop();
    this.#newTimeline();
    this.#showPads();
    this.#callbacks.ended(result);
  }

  #newTimeline() {
    this.#path.allShown();
    this.#steering.allSeen();
  }

  #steered() {
    this.#steering.update();
    this.#showPads();
    this.#drawMap();
  }

  #showPads() {
    const coming = new Set(this.#steering.onTheWay.flatMap((axes) => [...directionsOf(axes)]));
    view.showPads(directionsOf(this.#controls.axes), coming);
  }

  #refresh() {
    if (this.lives && this.#path.shown(this.#screen.time ?? 0)) this.#drawMap();
    const bufferedSeconds = this.lives ? this.#screen.bufferedSeconds : null;
    showFigures({ stats: this.#stats, fps: this.#fps, bufferedSeconds, queue: this.#position });
    view.showClock(this.#screen.time ?? this.#stats.pixelFrames / this.#fps);
  }

  #draw() {
    this.#drawMap();
    this.#drawIntervals();
  }

  #drawMap() {
    showMap(this.#path, { coming: this.#steering.onTheWay.length > 0 });
  }

  #drawIntervals() {
    showIntervals({ stats: this.#stats, fps: this.#fps });
  }
}
