// One session over one WebSocket: from the start message to the end, told in callbacks.

import { cameraEvent, decode, encode, promptEvent } from "./protocol.js";

const PING_MS = 10_000;
const SILENCE_MS = 35_000;

/** Address of a path of this server, also behind a path prefix. */
export function socketUrl(path) {
  const url = new URL(path, document.baseURI);
  url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
  return url.href;
}

/**
 * States: connecting, queued, starting, running, stopping, ended.
 *
 * Callbacks: state(name), queued(position), started(message), chunk(metadata, bytes),
 * interaction(eventId, status, error), reset(), refused(error), ended({kind, message, error}) with
 * kind `done`, `failed` (the server said why), `lost` (the connection broke) or `shut` (there never
 * was one).
 */
export class Session {
  #socket;
  #callbacks;
  #metadata = null;
  #lastError = null;
  #lastHeard = performance.now();
  #timer = null;
  #events = { camera: 0, prompt: 0 };
  #connected = false;
  state = "connecting";

  /** @param {string[]} subprotocols what lets the socket in */
  constructor(url, subprotocols, start, callbacks) {
    this.#callbacks = callbacks;
    this.#socket = new WebSocket(url, subprotocols);
    this.#socket.binaryType = "arraybuffer";
    this.#socket.onopen = () => {
      this.#connected = true;
      this.#socket.send(encode("session.start", start));
    };
    this.#socket.onmessage = ({ data }) => this.#heard(data);
    this.#socket.onclose = () => this.#closed();
    this.#timer = setInterval(() => this.#keepAlive(), PING_MS);
  }

  /** Whether the world can be steered now. */
  get open() {
    return this.state === "starting" || this.state === "running";
  }

  /** Send a camera velocity; returns its event id, or null if the session is not open. */
  camera(velocity) {
    return this.#interact("camera", (id) => cameraEvent(id, velocity));
  }

  /** Send a prompt; returns its event id, or null if the session is not open. */
  prompt(text, transitionChunks) {
    return this.#interact("prompt", (id) => promptEvent(id, text, transitionChunks));
  }

  /** Ask for the world to start over at the next chunk boundary. */
  reset(fields) {
    if (this.open) this.#socket.send(encode("session.reset", fields));
  }

  /** Ask for the end. */
  stop() {
    if (this.state === "ended") return;
    if (this.state === "connecting") {
      this.#end({ kind: "done", message: "Stopped." });
      return;
    }
    this.#enter("stopping");
    this.#socket.send(encode("session.stop"));
  }

  #interact(kind, message) {
    if (!this.open) return null;
    this.#events[kind] += 1;
    const id = `${kind}-${this.#events[kind]}`;
    this.#socket.send(message(id));
    return id;
  }

  #heard(data) {
    this.#lastHeard = performance.now();
    if (this.state === "ended") return;
    if (typeof data !== "string") {
      this.#bytes(data);
      return;
    }
    const message = decode(data);
    if (message) this.#message(message);
  }

  #bytes(data) {
    const metadata = this.#metadata;
    this.#metadata = null;
    this.#lastError = null;
    if (!metadata || metadata.kind !== "media") return;
    if (this.state === "starting") this.#enter("running");
    this.#callbacks.chunk(metadata, data);
  }

  #message(message) {
    const handlers = {
      "session.queued": () => this.#queued(message),
      "video.start": () => this.#started(message),
      "video.chunk_metadata": () => this.#announced(message),
      "session.interaction.queued": () => this.#callbacks.interaction(message.event_id, "queued"),
      "session.reset.done": () => this.#callbacks.reset(),
      "session.done": () => this.#end({ kind: "done", message: this.#doneText(message) }),
      error: () => this.#refused(message),
    };
    handlers[message.type]?.();
  }

  #queued({ position }) {
    if (this.state !== "stopping") this.#enter("queued");
    this.#callbacks.queued(position);
  }

  #started(message) {
    if (this.state !== "stopping") this.#enter("starting");
    this.#callbacks.started(message);
  }

  #announced(message) {
    this.#metadata = message;
    for (const id of message.started_event_ids ?? []) this.#callbacks.interaction(id, "started");
    for (const id of message.completed_event_ids ?? []) {
      this.#callbacks.interaction(id, "completed");
    }
  }

  #refused(message) {
    if (message.event_id) {
      this.#callbacks.interaction(message.event_id, "refused", message);
      return;
    }
    this.#lastError = message;
    this.#callbacks.refused(message);
  }

  #doneText({ chunks, stopped }) {
    return stopped ? `Stopped after ${chunks} chunks.` : `Finished after ${chunks} chunks.`;
  }

  #closed() {
    const error = this.#lastError;
    if (error) this.#end({ kind: "failed", message: error.message, error });
    else if (!this.#connected) this.#end({ kind: "shut", message: "No connection." });
    else this.#end({ kind: "lost", message: "The connection to the server was lost." });
  }

  #end(result) {
    if (this.state === "ended") return;
    clearInterval(this.#timer);
    this.#enter("ended");
    this.#socket.close();
    this.#callbacks.ended(result);
  }

  #enter(state) {
    this.state = state;
    this.#callbacks.state(state);
  }

  #keepAlive() {
    if (performance.now() - this.#lastHeard > SILENCE_MS) {
      this.#end({ kind: "lost", message: "The server has been silent for too long." });
    } else if (this.#socket.readyState === WebSocket.OPEN) {
      this.#socket.send(encode("session.ping"));
    }
  }
}
