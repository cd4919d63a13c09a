// What happened, in the words of somebody who visits a page and runs no server.

const BY_CODE = {
  server_full: "Every place on this server is taken, and so is the line. Try again in a few minutes.",
  worker_restarted: "The server had to start its model anew, so this world is gone.",
  client_too_slow: "This connection is too slow for the video, so the server ended the world.",
  event_id_conflict: "The server did not take the last change. Please try again.",
};
const PICTURE = "The server cannot use this picture. PNG, JPEG and WebP files work.";
const BY_FIELD = {
  image: PICTURE,
  image_reference: PICTURE,
  prompt: "The server cannot use this prompt. Please put it another way.",
};
const SIZE_FIELDS = ["size", "width", "height"];

/**
 * An error of the server: `{text, size}`, where `size` is one the server has room for, if the size
 * was the trouble.
 *
 * @param {{message: string, code: string | null}} error
 * @param {{asked: {width: number, height: number}, capabilities: object | null}} about
 */
export function refusalWords({ message, code }, { asked, capabilities }) {
  // An error about a field begins with its dotted name.
  const names = /^([\w.]+): /.exec(message)?.[1].split(".") ?? [];
  const room = { width: capabilities?.width ?? null, height: capabilities?.height ?? null };
  const fits = asked.width === room.width && asked.height === room.height;
  const isSize = names.some((name) => SIZE_FIELDS.includes(name));
  if (isSize || (code === "out_of_memory" && !fits)) return tooLarge(asked, room);
  if (code === "out_of_memory") return plain("The server is out of memory. Try again later.");
  if (code === "invalid_request") {
    const known = BY_FIELD[names.find((name) => name in BY_FIELD)];
    return plain(known ?? `The server did not accept this: ${message}`);
  }
  return plain(BY_CODE[code] ?? endWords(message));
}

/** Why the server is not ready, from its health. */
export function unreadyWords({ reason, progress, waitedS }) {
  if (reason === "loading") {
    const part = progress === null ? `${waitedS} s so far` : `${Math.round(100 * progress)} %`;
    return `The model is loading, ${part}`;
  }
  if (reason === "restarting") return "The server starts its model anew";
  if (reason === "draining") return "The server is about to shut down";
  return "The server is not ready";
}

/** A place in the line. */
export function queueWords(position) {
  return position === 1 ? "Waiting in line: you are next" : `Waiting in line, position ${position}`;
}

function tooLarge(asked, { width, height }) {
  if (!width || !height) {
    return plain(`The server has no room for ${asked.width} x ${asked.height}. Choose a smaller size.`);
  }
  return { text: `This server has room for ${width} x ${height}.`, size: { width, height } };
}

function endWords(message) {
  if (/shut(ting)? down/.test(message)) return "The server is shutting down.";
  if (/^Stall timeout/.test(message)) return "The server made no picture for a minute and gave up.";
  return "Something went wrong on the server, and the world ended. Please try again.";
}

function plain(text) {
  return { text, size: null };
}
