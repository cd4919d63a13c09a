// Writes to the page: every element is looked up once, here, and every text is set as text.

import { drawIntervals, drawPath } from "./charts.js";

const STATES = {
  idle: "Ready",
  connecting: "Connecting",
  queued: "Waiting in line",
  starting: "First chunk on its way",
  running: "Running",
  stopping: "Stopping at the next chunk",
  failed: "Not running",
};
const STEPS = ["queued", "started", "completed"];
const LOG_LINES = 200;
const NONE = "–";

const element = (id) => document.getElementById(id);

export const dom = Object.fromEntries(
  [
    "alert", "change", "clock", "dismiss", "file", "fps", "height", "intervals", "lead", "log",
    "look", "model", "move", "next-prompt", "notice", "own", "own-name", "path", "pictures",
    "poster", "prompt", "reconnect", "reset", "save", "seed", "send-prompt", "stage", "start",
    "status", "steps", "still", "stop", "transition", "veil", "video", "width", "world",
  ].map((id) => [id.replaceAll(/-(.)/g, (_, letter) => letter.toUpperCase()), element(id)]),
);

/** Show the state in words and enable what makes sense in it. */
export function showState(state, detail = "") {
  const live = state === "starting" || state === "running";
  const busy = live || ["connecting", "queued", "stopping"].includes(state);
  dom.status.dataset.state = state;
  dom.status.lastElementChild.textContent = detail || STATES[state];
  dom.start.disabled = busy;
  dom.stop.disabled = !busy || state === "stopping";
  for (const control of [dom.reset, dom.nextPrompt, dom.transition, dom.sendPrompt]) {
    control.disabled = !live;
  }
  dom.stage.classList.toggle("idle", !busy);
  const waiting = ["connecting", "queued", "starting"].includes(state);
  showVeil(waiting ? detail || STATES[state] : "");
}

/** Cover the picture with a waiting sign, or uncover it. */
export function showVeil(text) {
  dom.veil.hidden = !text;
  const words = document.createElement("span");
  words.textContent = text;
  dom.veil.lastElementChild.replaceWith(words);
}

/** Show one of the three layers: `poster`, `video` or `still`. */
export function showLayer(layer) {
  for (const name of ["poster", "video", "still"]) dom[name].hidden = name !== layer;
}

/** Say something at the bottom of the picture; nothing hides it. */
export function showNotice(text) {
  dom.notice.hidden = !text;
  dom.notice.textContent = text;
}

/** Say in words what went wrong; `again` names a button for another try. */
export function showAlert(text, { again = null } = {}) {
  dom.alert.hidden = false;
  dom.alert.firstElementChild.textContent = text;
  dom.reconnect.hidden = again === null;
  dom.reconnect.textContent = again ?? "";
}

export function hideAlert() {
  dom.alert.hidden = true;
}

/** Mark the steps of the newest prompt up to this one; null clears, "refused" marks a refusal. */
export function showPromptStep(step) {
  const reached = STEPS.indexOf(step);
  dom.steps.classList.toggle("refused", step === "refused");
  for (const item of dom.steps.children) {
    item.classList.toggle("reached", STEPS.indexOf(item.dataset.step) <= reached);
  }
}

/** Mark the held keys on the pads. */
export function showHeld(held) {
  for (const button of document.querySelectorAll(".pad [data-key]")) {
    button.classList.toggle("held", held.has(button.dataset.key));
  }
}

/** Add a line to the event log. */
export function log(text, { bad = false } = {}) {
  const line = document.createElement("li");
  const time = document.createElement("time");
  time.textContent = new Date().toTimeString().slice(0, 8);
  const words = document.createElement("span");
  words.textContent = text;
  line.append(time, words);
  line.classList.toggle("bad", bad);
  const follow = dom.log.scrollHeight - dom.log.scrollTop - dom.log.clientHeight < 24;
  dom.log.append(line);
  while (dom.log.children.length > LOG_LINES) dom.log.firstElementChild.remove();
  if (follow) dom.log.scrollTop = dom.log.scrollHeight;
}

/** Fill the live panel. */
export function showFigures({ stats, fps, bufferedSeconds, queue }) {
  figure("rate", stats.rate, (rate) => [rate.toFixed(1), `of ${tidy(fps)} fps`]);
  figure("delay", stats.delayMs, (ms) => [Math.round(ms), "ms"]);
  figure("first", stats.firstChunkMs, (ms) => [(ms / 1000).toFixed(2), "s"]);
  figure("buffered", bufferedSeconds, (seconds) => [seconds.toFixed(1), "s"]);
  figure("chunks", stats.chunks || null, (n) => [n, late(stats.lateChunks)]);
  figure("queue", queue, (position) => [position, position === 1 ? "you are next" : "in line"]);
  const interval = stats.intervalMs;
  element("interval").textContent = interval === null ? NONE : `${Math.round(interval)} ms`;
}

/** Redraw both charts. */
export function showCharts({ stats, fps, path, chunkFrames }) {
  drawIntervals(dom.intervals, stats.intervals, (1000 * chunkFrames) / fps);
  drawPath(dom.path, path.points, path.pose);
  const degrees = (radians) => Math.round((radians * 180) / Math.PI);
  const { heading, pitch } = path.pose;
  element("pose").textContent = `heading ${degrees(heading)}°, pitch ${degrees(pitch)}°`;
}

/** Seconds as minutes and seconds with one decimal. */
export function showClock(seconds) {
  const rest = (seconds % 60).toFixed(1).padStart(4, "0");
  dom.clock.textContent = `${Math.floor(seconds / 60)}:${rest}`;
}

function figure(id, value, texts) {
  const target = element(id);
  if (value === null || value === undefined) {
    target.textContent = NONE;
    return;
  }
  const [number, unit] = texts(value);
  const [figures, small] = ["b", "small"].map((name) => document.createElement(name));
  figures.textContent = number;
  small.textContent = unit;
  target.replaceChildren(figures, " ", small);
}

function late(count) {
  return count ? `${count} late` : "none late";
}

function tidy(value) {
  return Number.isInteger(value) ? value : value.toFixed(2);
}
