// The map on the picture: the camera's path from above, solid where it was walked, dashed where
// it is on its way.

import { prepare } from "./charts.js";

const MARGIN = 18;
const MIN_EXTENT = 1;
const MIN_GRID_STEP = 14;
const VIEW_ANGLE = 0.69;
const VIEW_LENGTH = 22;
// The map lies on the picture, so its colours are those of no theme.
const LINE = "rgb(255 255 255 / 13%)";
const WALKED = "#9db8ff";
const COMING = "#ffd9a0";

/** Draw the path: first view up, one grid line per unit of the world. */
export function drawMap(canvas, { walked, ahead }) {
  // Not to be seen before the first walk.
  if (!canvas.clientWidth) return;
  const { context, width, height } = prepare(canvas);
  const view = fit([...walked, ...ahead], width, height);
  drawGrid(context, view);
  drawLine(context, view, walked, { colour: WALKED, dash: [] });
  drawLine(context, view, ahead, { colour: COMING, dash: [3, 3] });
  if (ahead.length > 1) drawCone(context, view, ahead.at(-1), { colour: COMING, filled: false });
  drawCone(context, view, walked.at(-1), { colour: WALKED, filled: true });
}

function fit(points, width, height) {
  const bounds = ["x", "z"].map((axis) => {
    const values = points.map((point) => point[axis]);
    return { low: Math.min(...values), high: Math.max(...values) };
  });
  const extents = bounds.map(({ low, high }) => Math.max(high - low, MIN_EXTENT));
  const scale = Math.min((width - 2 * MARGIN) / extents[0], (height - 2 * MARGIN) / extents[1]);
  const [middleX, middleZ] = bounds.map(({ low, high }) => (low + high) / 2);
  return {
    width,
    height,
    scale,
    x: (x) => width / 2 + (x - middleX) * scale,
    y: (z) => height / 2 - (z - middleZ) * scale,
  };
}

function drawGrid(context, view) {
  let step = view.scale;
  while (step < MIN_GRID_STEP) step *= 5;
  context.strokeStyle = LINE;
  context.lineWidth = 1;
  context.beginPath();
  for (let x = view.x(0) % step; x < view.width; x += step) {
    context.moveTo(Math.round(x) + 0.5, 0);
    context.lineTo(Math.round(x) + 0.5, view.height);
  }
  for (let y = view.y(0) % step; y < view.height; y += step) {
    context.moveTo(0, Math.round(y) + 0.5);
    context.lineTo(view.width, Math.round(y) + 0.5);
  }
  context.stroke();
}

function drawLine(context, view, points, { colour, dash }) {
  context.strokeStyle = colour;
  context.lineWidth = 1.75;
  context.lineJoin = "round";
  context.setLineDash(dash);
  context.beginPath();
  points.forEach(({ x, z }, index) => {
    if (index) context.lineTo(view.x(x), view.y(z));
    else context.moveTo(view.x(x), view.y(z));
  });
  context.stroke();
  context.setLineDash([]);
}

function drawCone(context, view, { x, z, heading }, { colour, filled }) {
  context.save();
  context.translate(view.x(x), view.y(z));
  context.rotate(heading);
  context.fillStyle = context.strokeStyle = colour;
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(0, 0);
  context.arc(0, 0, VIEW_LENGTH, -Math.PI / 2 - VIEW_ANGLE, -Math.PI / 2 + VIEW_ANGLE);
  context.closePath();
  context.globalAlpha = filled ? 0.3 : 0.8;
  if (filled) context.fill();
  else context.stroke();
  if (filled) {
    context.globalAlpha = 1;
    context.beginPath();
    context.arc(0, 0, 4, 0, 2 * Math.PI);
    context.fill();
  }
  context.restore();
}
