// Waits for a server that has gone, with growing pauses, and says when it is back.

const FIRST_PAUSE_MS = 1000;
const LONGEST_PAUSE_MS = 8000;
const GIVE_UP_MS = 15 * 60_000;

export class ServerWatch {
  #timer = null;

  /** Ask until the server is ready; `waiting(seconds)` before each pause. */
  start({ waiting, back, gaveUp }) {
    this.stop();
    const begun = performance.now();
    const look = async (pause) => {
      if (await ready()) back();
      else if (performance.now() - begun > GIVE_UP_MS) gaveUp();
      else next(pause);
    };
    const next = (pause) => {
      waiting(Math.round(pause / 1000));
      this.#timer = setTimeout(() => look(Math.min(2 * pause, LONGEST_PAUSE_MS)), pause);
    };
    next(FIRST_PAUSE_MS);
  }

  stop() {
    clearTimeout(this.#timer);
    this.#timer = null;
  }
}

async function ready() {
  const response = await fetch("health", { cache: "no-store" }).catch(() => null);
  return Boolean(response?.ok);
}
