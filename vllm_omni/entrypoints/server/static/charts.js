// Two drawings: chunk intervals against their deadline, and the camera's path from above.

/** Size a canvas to its box on this screen; returns its context in CSS pixels. */
function prepare(canvas) {
  const { clientWidth: width, clientHeight: height } = canvas;
  const scale = globalThis.devicePixelRatio || 1;
  const [columns, rows] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== columns || canvas.height !== rows) {
    canvas.width = columns;
    canvas.height = rows;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

function colours(canvas) {
  const style = getComputedStyle(canvas);
  const named = (name) => style.getPropertyValue(`--${name}`).trim();
  return {
    accent: named("accent"),
    late: named("late"),
    line: named("line"),
    muted: named("muted"),
    font: `11px ${style.fontFamily}`,
  };
}

const BAR_WIDTH = 4;
const BAR_GAP = 2;

/** Bars of the last intervals; a dashed line marks the deadline. */
export function drawIntervals(canvas, intervals, deadlineMs) {
  const { context, width, height } = prepare(canvas);
  const palette = colours(canvas);
  const shown = intervals.slice(-Math.floor(width / (BAR_WIDTH + BAR_GAP)));
  const top = Math.max(deadlineMs * 1.4, ...shown.map((entry) => entry.ms * 1.05));
  const y = (ms) => height - (ms / top) * height;
  shown.forEach((entry, index) => {
    const x = width - (shown.length - index) * (BAR_WIDTH + BAR_GAP);
    context.fillStyle = entry.late ? palette.late : palette.accent;
    context.beginPath();
    context.roundRect(x, y(entry.ms), BAR_WIDTH, height - y(entry.ms), [1.5, 1.5, 0, 0]);
    context.fill();
  });
  drawDeadline(context, palette, { y: y(deadlineMs), width, deadlineMs });
}

function drawDeadline(context, palette, { y, width, deadlineMs }) {
  context.strokeStyle = palette.muted;
  context.setLineDash([3, 3]);
  context.beginPath();
  context.moveTo(0, Math.round(y) + 0.5);
  context.lineTo(width, Math.round(y) + 0.5);
  context.stroke();
  context.setLineDash([]);
  context.fillStyle = palette.muted;
  context.font = palette.font;
  context.fillText(`deadline ${Math.round(deadlineMs)} ms`, 2, y - 4);
}

const MARGIN = 16;
const MIN_EXTENT = 1;

/** The path from above: first view up, one grid line per unit of the world. */
export function drawPath(canvas, points, pose) {
  const { context, width, height } = prepare(canvas);
  const palette = colours(canvas);
  const view = fit(points, width, height);
  drawGrid(context, palette, view);
  context.strokeStyle = palette.accent;
  context.lineWidth = 1.75;
  context.lineJoin = "round";
  context.beginPath();
  points.forEach(([x, z], index) => {
    if (index) context.lineTo(view.x(x), view.y(z));
    else context.moveTo(view.x(x), view.y(z));
  });
  context.stroke();
  drawDot(context, palette.muted, [view.x(points[0][0]), view.y(points[0][1])]);
  drawCamera(context, palette, [view.x(pose.position[0]), view.y(pose.position[2])], pose.heading);
}

function fit(points, width, height) {
  const bounds = [0, 1].map((axis) => {
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

function drawGrid(context, palette, view) {
  let step = view.scale;
  while (step < 14) step *= 5;
  context.strokeStyle = palette.line;
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

function drawDot(context, colour, [x, y]) {
  context.fillStyle = colour;
  context.beginPath();
  context.arc(x, y, 2.5, 0, 2 * Math.PI);
  context.fill();
}

function drawCamera(context, palette, [x, y], heading) {
  context.save();
  context.translate(x, y);
  context.rotate(heading);
  context.fillStyle = palette.accent;
  context.globalAlpha = 0.18;
  context.beginPath();
  context.moveTo(0, 0);
  context.arc(0, 0, 26, -Math.PI / 2 - 0.69, -Math.PI / 2 + 0.69);
  context.fill();
  context.globalAlpha = 1;
  context.beginPath();
  context.arc(0, 0, 4, 0, 2 * Math.PI);
  context.fill();
  context.restore();
}
