// The chart of chunk intervals against their deadline, and what all drawings need.

/** Size a canvas to its box on this screen; returns its context in CSS pixels. */
export function prepare(canvas) {
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

export function colours(canvas) {
  const style = getComputedStyle(canvas);
  const named = (name) => style.getPropertyValue(`--${name}`).trim();
  return {
    accent: named("accent"),
    late: named("late"),
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
