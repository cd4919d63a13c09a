// Writes to the page: every element is looked up once, here, and every text is set as text.

const STATES = {
  idle: "Ready",
  connecting: "Connecting",
  queued: "Waiting in line",
  starting: "First pictures on their way",
  running: "Running",
  stopping: "Stopping at the next chunk",
  failed: "Not running",
  loading: "The model is loading",
};
const STEPS = ["queued", "started", "completed"];
const LOG_LINES = 200;

const element = (id) => document.getElementById(id);

export const dom = Object.fromEntries(
  [
    "again", "alert", "ask", "ask-no", "ask-text", "ask-yes", "change", "clock", "dismiss", "file",
    "fps", "full", "height", "intervals", "key", "key-dialog", "key-no", "key-text", "lead", "live",
    "live-toggle", "log", "model", "next-prompt", "notice", "own", "own-name", "own-thumb", "path",
    "pictures", "pose", "poster", "progress", "prompt", "reset", "save", "scene", "seed",
    "send-prompt", "settings", "setup", "stage", "start", "status", "steps", "still", "stop", "transition",
    "veil", "video", "walks", "walks-dialog", "walks-no", "width", "setup-toggle",
  ].map((id) => [id.replaceAll(/-(.)/g, (_, letter) => letter.toUpperCase()), element(id)]),
);

/** Show the state in words and offer what makes sense in it. */
export function showState(state, { words = "", progress = null } = {}) {
  const live = state === "starting" || state === "running";
  const coming = state === "connecting" || state === "queued";
  const busy = live || coming || state === "stopping";
  const text = words || STATES[state];
  dom.status.dataset.state = state;
  if (dom.status.lastElementChild.textContent !== text) {
    dom.status.lastElementChild.textContent = text;
  }
  dom.start.hidden = busy;
  for (const control of [dom.stop, dom.reset]) control.hidden = !live && !coming;
  for (const control of [dom.reset, dom.nextPrompt, dom.transition, dom.sendPrompt]) {
    control.disabled = !live;
  }
  // They hold for a whole session.
  dom.settings.disabled = busy;
  showVeil(coming || state === "starting" ? text : "", progress);
}

/** Cover the picture with a waiting sign, or uncover it. */
export function showVeil(text, progress = null) {
  dom.veil.hidden = !text;
  dom.veil.querySelector("p").textContent = text;
  dom.progress.hidden = progress === null;
  if (progress !== null) dom.progress.value = progress;
}

/** Show one of the three layers: `poster`, `video` or `still`. */
export function showLayer(layer) {
  for (const name of ["poster", "video", "still"]) dom[name].hidden = name !== layer;
}

/** Give the picture its shape. */
export function showShape({ width, height }) {
  dom.scene.style.setProperty("--ratio", String(width / height));
}

/** Keep the present picture of the video on the screen while another video begins. */
export function freeze() {
  if (dom.video.hidden || !dom.video.videoWidth) return;
  dom.still.width = dom.video.videoWidth;
  dom.still.height = dom.video.videoHeight;
  dom.still.getContext("2d").drawImage(dom.video, 0, 0);
  showLayer("still");
}

/** Say something at the bottom of the picture; nothing hides it. */
export function showNotice(text) {
  dom.notice.hidden = !text;
  dom.notice.textContent = text;
}

/** Say in words what went wrong; `action` is {label, run} of a button for what helps. */
export function showAlert(text, action = null) {
  dom.alert.hidden = false;
  dom.alert.firstElementChild.textContent = text;
  dom.again.hidden = action === null;
  dom.again.textContent = action?.label ?? "";
  dom.again.onclick = action?.run ?? null;
}

export function hideAlert() {
  dom.alert.hidden = true;
}

/** Mark the steps of the newest prompt up to this one; null clears, "refused" marks a refusal. */
export function showPromptStep(step) {
  const reached = STEPS.indexOf(step);
  dom.steps.hidden = step === null;
  dom.steps.classList.toggle("refused", step === "refused");
  for (const item of dom.steps.children) {
    item.classList.toggle("reached", STEPS.indexOf(item.dataset.step) <= reached);
  }
}

/** Mark the pads' buttons that are held, and those whose effect is still on its way. */
export function showPads(held, coming) {
  for (const button of document.querySelectorAll(".pad [data-key]")) {
    button.classList.toggle("held", held.has(button.dataset.key));
    button.classList.toggle("coming", coming.has(button.dataset.key));
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

/** Seconds as minutes and seconds, with so many decimals. */
export function durationWords(seconds, decimals = 0) {
  const whole = Math.floor(seconds * 10 ** decimals) / 10 ** decimals;
  const rest = (whole % 60).toFixed(decimals).padStart(decimals ? decimals + 3 : 2, "0");
  return `${Math.floor(whole / 60)}:${rest}`;
}

/** Seconds of the world that were shown. */
export function showClock(seconds) {
  dom.clock.textContent = durationWords(seconds, 1);
}
