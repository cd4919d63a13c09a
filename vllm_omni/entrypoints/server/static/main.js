// The page: joins the form, the session, the player, the controls and the live panel.

import { CameraPath } from "./camera_path.js";
import { Controls } from "./controls.js";
import { Player } from "./player.js";
import { Recorder } from "./recorder.js";
import { Session, socketUrl } from "./session.js";
import { Setup } from "./setup.js";
import { Stats } from "./stats.js";
import { Steering } from "./steering.js";
import { Stills } from "./stills.js";
import * as view from "./view.js";
import { ServerWatch } from "./watch.js";

const { dom } = view;
const REFRESH_MS = 200;
const CHUNK_FRAMES = 12;

class App {
  #stats = new Stats();
  #path = new CameraPath();
  #recorder = new Recorder();
  #watch = new ServerWatch();
  #session = null;
  #setup;
  #player;
  #stills;
  #controls;
  #steering;
  #queue = null;
  #fps = 16;
  #promptId = null;
  #hasVideo = false;

  constructor() {
    this.#setup = new Setup(() => this.#showPoster());
    this.#player = new Player(dom.video, {
      unsupported: (init) => this.#withoutVideo(init),
      stall: (reason) => view.log(`Playback restarted: ${reason}.`),
    });
    this.#stills = new Stills(dom.still);
    this.#controls = new Controls(dom.stage.parentElement, () => this.#steered());
    this.#steering = new Steering(this.#controls, this.#path);
    this.#listen();
    this.#showPoster();
    view.showState("idle");
    setInterval(() => this.#refresh(), REFRESH_MS);
    this.#draw();
    this.#setup.loadDefaults();
    showModelName();
  }

  #listen() {
    dom.world.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#start();
    });
    dom.stop.addEventListener("click", () => this.#session?.stop());
    dom.reset.addEventListener("click", () => this.#reset());
    dom.save.addEventListener("click", () => this.#recorder.save(fileName()));
    dom.reconnect.addEventListener("click", () => this.#start());
    dom.dismiss.addEventListener("click", () => this.#dismiss());
    dom.change.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#changePrompt();
    });
    dom.nextPrompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey) return;
      event.preventDefault();
      this.#changePrompt();
    });
    addEventListener("keydown", ({ key }) => {
      if (key === "Escape") dom.stage.focus();
    });
    dom.poster.addEventListener("error", () => this.#posterFailed());
    dom.stage.addEventListener("pointerdown", () => dom.stage.focus());
    new ResizeObserver(() => this.#draw()).observe(dom.path);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#draw());
  }

  async #start() {
    if (this.#session || !dom.world.reportValidity()) return;
    this.#watch.stop();
    view.hideAlert();
    view.showState("connecting");
    const fields = await this.#setup.startFields().catch((error) => error);
    if (fields instanceof Error) {
      view.log(fields.message, { bad: true });
      this.#failed(fields.message);
      return;
    }
    this.#fps = fields.fps;
    this.#clear();
    this.#stats.begin(performance.now());
    this.#player.start({ fps: fields.fps, leadMs: fields.max_lead_ms });
    const url = socketUrl("v1/realtime/video");
    this.#session = new Session(url, fields, this.#callbacks());
    view.log(`Start: ${fields.width} x ${fields.height}, seed ${fields.seed}.`);
    dom.stage.focus({ preventScroll: true });
  }

  #clear() {
    this.#stats.clear();
    this.#path.clear();
    this.#recorder.clear();
    this.#stills.stop();
    this.#hasVideo = false;
    this.#promptId = null;
    this.#queue = null;
    dom.save.disabled = true;
    view.showNotice("");
    view.showPromptStep(null);
    view.showLayer("poster");
    this.#draw();
  }

  #callbacks() {
    return {
      state: (state) => view.showState(state === "ended" ? "idle" : state),
      queued: (position) => this.#queued(position),
      started: (message) => this.#started(message),
      chunk: (metadata, bytes) => this.#chunk(metadata, bytes),
      interaction: (id, status, words) => this.#interaction(id, status, words),
      reset: () => this.#wasReset(),
      refused: ({ message }) => this.#refused(message),
      ended: (result) => this.#ended(result),
    };
  }

  #queued(position) {
    if (position !== this.#queue) view.log(`Waiting in line, position ${position}.`);
    this.#queue = position;
    view.showState("queued", `Waiting in line, position ${position}`);
  }

  #started({ request_id: requestId }) {
    if (this.#queue !== null) this.#stats.begin(performance.now());
    this.#queue = null;
    view.log(`Accepted as ${requestId}.`);
    this.#steering.attach(this.#session);
  }

  #chunk(metadata, bytes) {
    this.#stats.chunk(performance.now(), metadata.num_frames, this.#fps);
    const mediaTime = this.#player.push(bytes, metadata.num_frames);
    if (mediaTime === null) this.#stills.push(bytes);
    else this.#showVideo();
    this.#steering.chunk(metadata, (pixelFrame, sentAt) => {
      if (mediaTime === null) return;
      this.#player.whenShown(mediaTime + pixelFrame / this.#fps, () => {
        this.#stats.shown(performance.now() - sentAt);
      });
    });
    this.#record(bytes);
    this.#draw();
  }

  #record(bytes) {
    const wasFull = this.#recorder.full;
    const kept = this.#recorder.push(bytes);
    dom.save.disabled = this.#recorder.bytes === 0;
    if (!kept && !wasFull) view.log("The recording has reached 1 GiB; later chunks are not in it.");
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
      `This browser cannot play H.264 video, so ${what}. The world goes on; Save MP4 keeps it.`,
    );
    view.log("No H.264 playback in this browser.", { bad: true });
    if (stills) view.showLayer("still");
  }

  #interaction(id, status, words) {
    const isPrompt = id === this.#promptId;
    if (status === "refused") {
      this.#steering.refused(id);
      this.#refused(words);
    } else if (isPrompt || status === "started") {
      view.log(`${id} ${status}.`);
    }
    if (isPrompt) view.showPromptStep(status);
  }

  #changePrompt() {
    const text = dom.nextPrompt.value.trim();
    if (!text) return;
    this.#promptId = this.#session?.prompt(text, Number(dom.transition.value)) ?? null;
    view.showPromptStep(null);
    if (this.#promptId) view.log(`${this.#promptId}: “${text}”`);
  }

  async #reset() {
    const fields = await this.#setup.resetFields().catch((error) => error);
    if (fields instanceof Error) this.#refused(fields.message);
    else this.#session?.reset(fields);
  }

  #wasReset() {
    view.log("The world starts over.");
    this.#steering.restart();
    this.#recorder.restart();
    this.#player.restart();
    this.#draw();
  }

  #refused(words) {
    view.log(words, { bad: true });
    view.showAlert(words);
  }

  #ended({ kind, message }) {
    this.#session = null;
    this.#queue = null;
    this.#player.stop();
    // A refusal was logged when it came.
    if (kind !== "failed") view.log(message, { bad: kind === "lost" });
    if (kind === "failed") this.#failed(message);
    if (kind === "lost") this.#lost(message);
  }

  #failed(message) {
    view.showState("failed");
    view.showAlert(message, { again: "Try again" });
  }

  #lost(message) {
    view.showState("failed", "No connection");
    this.#watch.start({
      waiting: (seconds) =>
        view.showAlert(`${message} Looking for it again in ${seconds} s.`, { again: "Reconnect" }),
      back: () => this.#back(),
      gaveUp: () => view.showAlert(`${message} It did not come back.`, { again: "Reconnect" }),
    });
  }

  #back() {
    view.log("The server is back; starting again.");
    this.#start();
  }

  #dismiss() {
    this.#watch.stop();
    view.hideAlert();
    dom.stage.focus({ preventScroll: true });
  }

  #steered() {
    view.showHeld(this.#controls.held);
    this.#steering.update();
  }

  #showPoster() {
    if (!this.#setup) return;
    dom.poster.src = this.#setup.picture.previewUrl;
    if (!this.#session) view.showNotice("");
  }

  #posterFailed() {
    if (!dom.poster.hasAttribute("src")) return;
    dom.poster.removeAttribute("src");
    const name = this.#setup.picture.fileName ?? "this scene";
    view.showNotice(`This browser cannot show ${name}. Start asks the server.`);
  }

  #refresh() {
    const bufferedSeconds = this.#session && this.#hasVideo ? this.#player.bufferedSeconds : null;
    view.showFigures({ stats: this.#stats, fps: this.#fps, bufferedSeconds, queue: this.#queue });
    view.showClock(this.#hasVideo ? this.#player.time : this.#stats.pixelFrames / this.#fps);
  }

  #draw() {
    view.showCharts({
      stats: this.#stats,
      fps: this.#fps,
      path: this.#path,
      chunkFrames: CHUNK_FRAMES,
    });
  }
}

async function showModelName() {
  const response = await fetch("v1/models").catch(() => null);
  if (!response?.ok) return;
  const name = (await response.json()).data[0]?.id ?? "";
  // A served name is a directory unless the operator gave one; its last part says enough.
  dom.model.textContent = name.startsWith("/") ? name.split("/").at(-1) : name;
}

function fileName() {
  const stamp = new Date().toISOString().slice(0, 19).replaceAll(/[:T]/g, "-");
  return `lingbot-world-${stamp}.mp4`;
}

new App();
