// The page: joins the form, the server and the world; what happens when something goes wrong.

import { agrees, keyFrom, offerWalks } from "./ask.js";
import { Layout } from "./layout.js";
import { Server } from "./server.js";
import { Setup } from "./setup.js";
import * as view from "./view.js";
import { save } from "./walks.js";
import { ServerWatch } from "./watch.js";
import { queueWords, refusalWords, unreadyWords } from "./words.js";
import { World } from "./world.js";

const { dom } = view;
const NOT_LET_IN =
  "The server does not let this page in. Whoever runs it can allow the page's address (--allowed-origins).";

class App {
  #server = new Server();
  #layout = new Layout();
  #watch = new ServerWatch(this.#server);
  #world;
  #setup;
  #unready = null;
  #starting = false;
  #startsNext = false;

  constructor() {
    this.#setup = new Setup({
      pictureChanged: () => this.#showPoster(),
      sceneChosen: () => this.#sceneChosen(),
      fileChosen: () => this.#layout.open("setup"),
    });
    this.#world = new World({
      walking: () => this.#layout.walking,
      fullScreen: () => this.#layout.toggleFullScreen(),
      state: (state) => this.#entered(state),
      queued: (position) => this.#queued(position),
      refused: (error) => view.showAlert(this.#words(error).text),
      ended: (result) => this.#ended(result),
    });
    this.#listen();
    this.#showPoster();
    view.showState("idle");
    this.#arrive();
  }

  #listen() {
    dom.setup.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#start();
    });
    dom.start.addEventListener("click", () => this.#start());
    dom.stop.addEventListener("click", () => this.#world.stop());
    dom.reset.addEventListener("click", () => this.#startOver());
    dom.save.addEventListener("click", () => this.#save());
    dom.dismiss.addEventListener("click", () => this.#dismiss());
    dom.change.addEventListener("submit", (event) => {
      event.preventDefault();
      const text = dom.nextPrompt.value.trim();
      if (text) this.#world.prompt(text, Number(dom.transition.value));
    });
    addEventListener("keydown", ({ key, target }) => {
      if (key === "Escape" && !target.closest?.("dialog")) dom.stage.focus();
    });
    addEventListener("beforeunload", (event) => {
      if (this.#world.hasPictures) event.preventDefault();
    });
    dom.poster.addEventListener("error", () => this.#posterFailed());
    dom.stage.addEventListener("pointerdown", () => dom.stage.focus({ preventScroll: true }));
  }

  /** Learn what the server is like, and whether it is ready. */
  async #arrive() {
    if ((await this.#server.greet()) === "locked" && !(await this.#unlock())) return;
    if (!this.#server.capabilities) return;
    this.#setup.takeDefaults(this.#server.capabilities);
    dom.model.textContent = `Model: ${await this.#server.modelName()}`;
    if (!this.#world.lives) this.#followLoading();
  }

  /** Ask for the key until the server takes it; false if the viewer gives up. */
  async #unlock() {
    let words = "This server wants a key. Whoever runs it can give you one.";
    for (;;) {
      const key = await keyFrom(words);
      if (key === null) {
        view.showState("failed", { words: "A key is needed" });
        return false;
      }
      this.#server.key = key;
      if ((await this.#server.greet()) !== "locked") return true;
      words = "The server does not know this key.";
    }
  }

  /** Say how far the model is while it loads, before a start or in the line. */
  #followLoading() {
    const say = (health) => {
      this.#unready = health;
      this.#showWaiting();
    };
    this.#watch.start({ ready: () => say(null), waiting: say, gaveUp: () => {} });
  }

  #showWaiting() {
    const words = this.#unready ? unreadyWords(this.#unready) : null;
    const progress = this.#unready?.progress ?? null;
    if (this.#world.position !== null) {
      view.showState("queued", { words: words ?? queueWords(this.#world.position), progress });
    } else if (!this.#world.lives && dom.alert.hidden) {
      view.showState(words ? "loading" : "idle", { words: words ?? "" });
      view.showNotice(words ? `${words}. A world that you start now begins as soon as it can.` : "");
    }
  }

  async #start() {
    if (this.#starting || this.#world.lives) return;
    if (!this.#setup.complete) {
      this.#setup.askForMissing();
      return;
    }
    this.#starting = true;
    const fields = await this.#prepared().finally(() => {
      this.#starting = false;
    });
    if (!fields) return;
    view.showShape(fields);
    this.#world.begin(this.#setup.name, fields, this.#server.subprotocols);
    dom.stage.focus({ preventScroll: true });
  }

  /** The fields of a start message, once the server has its key; null if there are none. */
  async #prepared() {
    const locked = !this.#server.capabilities && (await this.#server.greet()) === "locked";
    if (locked && !(await this.#unlock())) return null;
    this.#watch.stop();
    this.#unready = null;
    view.hideAlert();
    view.showNotice("");
    view.showState("connecting");
    this.#layout.walking = true;
    try {
      return await this.#setup.startFields();
    } catch (error) {
      view.log(error.message, { bad: true });
      this.#failed(error.message);
      return null;
    }
  }

  #entered(state) {
    if (state === "stopping" || state === "ended") this.#layout.walking = false;
    if (state === "starting") this.#watch.stop();
    view.showState(state === "ended" ? "idle" : state);
  }

  #queued(position) {
    view.log(`${queueWords(position)}.`);
    this.#followLoading();
    this.#showWaiting();
  }

  /** A click on a scene starts it, at once or in place of the world that is running. */
  #sceneChosen() {
    if (this.#world.lives) this.#startOver();
    else this.#start();
  }

  async #startOver() {
    if (!this.#setup.complete) {
      this.#layout.open("setup");
      this.#setup.askForMissing();
      return;
    }
    if (!(await this.#mayLeave())) return;
    this.#layout.close("setup");
    if (!this.#world.open) {
      this.#startsNext = this.#world.lives;
      this.#world.stop();
      return;
    }
    const fields = await this.#setup.resetFields().catch((error) => error);
    if (fields instanceof Error) view.showAlert(fields.message);
    else this.#world.reset(this.#setup.name, fields);
    dom.stage.focus({ preventScroll: true });
  }

  /** Nothing that somebody walked through, or waited for, goes without a question. */
  async #mayLeave() {
    if (this.#world.position !== null) {
      return agrees("Leave the line?", { yes: "Leave", no: "Stay in line" });
    }
    if (!this.#world.hasPictures) return true;
    const question = `Start ${this.#setup.name} from its first picture? This walk ends; Save keeps it on offer.`;
    return agrees(question, { yes: "Start over", no: "Keep walking" });
  }

  async #save() {
    const { offered } = this.#world.walks;
    if (offered.length === 1) save(offered[0]);
    else await offerWalks(offered, save);
  }

  #ended({ kind, message, error }) {
    this.#watch.stop();
    const startsNext = this.#startsNext;
    this.#startsNext = false;
    if (kind === "failed") this.#refused(error);
    else if (kind === "shut") this.#shut();
    else if (kind === "lost") this.#lost(message);
    else view.log(message);
    if (kind === "done" && startsNext) this.#start();
  }

  #words(error) {
    const { capabilities } = this.#server;
    return refusalWords(error, { asked: this.#setup.size, capabilities });
  }

  #refused(error) {
    const { text, size } = this.#words(error);
    if (!size) {
      this.#failed(text);
      return;
    }
    this.#failed(text, {
      label: `Start at ${size.width} x ${size.height}`,
      run: () => {
        this.#setup.size = size;
        this.#start();
      },
    });
  }

  #failed(text, action = { label: "Try again", run: () => this.#start() }) {
    this.#layout.walking = false;
    view.showState("failed");
    view.showAlert(text, action);
  }

  /** The socket was never opened: find out why, and try again by itself only where that helps. */
  async #shut() {
    if (!(await this.#server.health())) {
      this.#lost("The server cannot be reached.");
    } else if ((await this.#server.greet()) === "locked") {
      if (await this.#unlock()) this.#start();
    } else {
      view.log(NOT_LET_IN, { bad: true });
      this.#failed(NOT_LET_IN);
    }
  }

  #lost(message) {
    view.log(message, { bad: true });
    view.showState("failed", { words: "No connection" });
    const again = { label: "Reconnect", run: () => this.#start() };
    const say = (what) => view.showAlert(`${message} ${what}`, again);
    this.#watch.start({
      ready: () => {
        view.log("The server is back; starting again.");
        this.#start();
      },
      waiting: (health, seconds) => {
        say(health ? `${unreadyWords(health)}.` : `Looking for it again in ${seconds} s.`);
      },
      gaveUp: () => say("It did not come back."),
    });
  }

  #dismiss() {
    this.#watch.stop();
    view.hideAlert();
    dom.stage.focus({ preventScroll: true });
  }

  #showPoster() {
    if (!this.#setup) return;
    dom.poster.src = this.#setup.picture.previewUrl;
    if (this.#world?.lives) return;
    view.showNotice("");
    view.showShape(this.#setup.size);
    view.showLayer("poster");
  }

  #posterFailed() {
    if (!dom.poster.hasAttribute("src")) return;
    dom.poster.removeAttribute("src");
    if (this.#world.lives) return;
    view.showNotice(`This browser cannot show “${this.#setup.name}”. Start asks the server.`);
  }
}

new App();
