// The figures of the running world, and the map on its picture.

import { drawIntervals } from "./charts.js";
import { drawMap } from "./map.js";
import { dom } from "./view.js";

const NONE = "–";
const CHUNK_FRAMES = 12;

const element = (id) => document.getElementById(id);

/** Fill the panel. */
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

/** Redraw the chart of chunk intervals. */
export function showIntervals({ stats, fps }) {
  if (!dom.live.hidden) drawIntervals(dom.intervals, stats.intervals, (1000 * CHUNK_FRAMES) / fps);
}

/** Redraw the map; `coming` if something that was asked for is not on the screen yet. */
export function showMap(path, { coming }) {
  drawMap(dom.path, path);
  dom.pose.textContent = coming ? "on its way" : poseWords(path.walked.at(-1));
  dom.pose.classList.toggle("coming", coming);
}

function poseWords({ heading, pitch }) {
  const [turned, up] = [heading, pitch].map((radians) => Math.round((radians * 180) / Math.PI) + 0);
  const tilt = up ? `, ${up > 0 ? "up" : "down"} ${Math.abs(up)}°` : "";
  return `heading ${turned}°${tilt}`;
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
