// Asks a server that is gone or not ready, with growing pauses, until it is ready.

const FIRST_PAUSE_MS = 1000;
const LONGEST_PAUSE_MS = 8000;
const GIVE_UP_MS = 15 * 60_000;

export class ServerWatch {
  #server;
  #timer = null;

  constructor(server) {
    this.#server = server;
  }

  /**
   * Ask until the server is ready: `waiting(health, seconds)` before each pause, with health null
   * while nobody answers and else with the seconds since the first look as `waitedS`; `gaveUp()`
   * after a quarter of an hour without an answer.
   */
  start({ ready, waiting, gaveUp }) {
    this.stop();
    const token = (this.#timer = {});
    const begun = performance.now();
    const look = async (pause, silentSince) => {
      const health = await this.#server.health();
      if (this.#timer !== token) return;
      const since = health ? performance.now() : silentSince;
      if (health?.ready) {
        this.stop();
        ready();
      } else if (performance.now() - since > GIVE_UP_MS) {
        this.stop();
        gaveUp();
      } else {
        // One that answers is asked often: its progress is shown.
        const wait = health ? FIRST_PAUSE_MS : pause;
        const waitedS = Math.round((performance.now() - begun) / 1000);
        waiting(health && { ...health, waitedS }, Math.round(wait / 1000));
        token.timeout = setTimeout(() => look(Math.min(2 * wait, LONGEST_PAUSE_MS), since), wait);
      }
    };
    look(FIRST_PAUSE_MS, begun);
  }

  stop() {
    clearTimeout(this.#timer?.timeout);
    this.#timer = null;
  }
}
