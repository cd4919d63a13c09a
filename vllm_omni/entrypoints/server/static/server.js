// What the server says of itself, and the key that it may want.
//
// A key travels in a header, or as the socket's subprotocol: never in an address. It is kept for
// as long as the tab is open.

import { pickCapabilities } from "./protocol.js";

const STORED_KEY = "vllm-omni-key";
const SUBPROTOCOL = "vllm-omni";
const UNAUTHORISED = 401;

export class Server {
  #key = sessionStorage.getItem(STORED_KEY) ?? "";
  /** Capabilities, once they could be read. */
  capabilities = null;

  /** Use this key from now on. */
  set key(key) {
    this.#key = key;
    sessionStorage.setItem(STORED_KEY, key);
  }

  get hasKey() {
    return this.#key !== "";
  }

  /** What a socket has to offer so that it is let in. */
  get subprotocols() {
    return this.hasKey ? [SUBPROTOCOL, `bearer.${base64url(this.#key)}`] : [];
  }

  /** Read the capabilities: `welcome`, `locked` (a key is wanted) or `absent`. */
  async greet() {
    const response = await this.#get("v1/realtime/capabilities");
    if (response?.status === UNAUTHORISED) return "locked";
    if (!response?.ok) return "absent";
    this.capabilities = pickCapabilities(await response.json());
    return "welcome";
  }

  /** {ready, reason, progress from 0 to 1 or null}, or null if nobody answers. */
  async health() {
    const response = await this.#get("health");
    if (!response) return null;
    if (response.ok) return { ready: true, reason: null, progress: null };
    const said = await response.json().catch(() => ({}));
    return { ready: false, reason: said.reason ?? "", progress: said.progress ?? null };
  }

  /** The name of the model, or an empty text. */
  async modelName() {
    const response = await this.#get("v1/models");
    if (!response?.ok) return "";
    const name = (await response.json()).data[0]?.id ?? "";
    // A served name is a directory unless the operator gave one; its last part says enough.
    return name.startsWith("/") ? name.split("/").at(-1) : name;
  }

  /** An answer, or null where the server cannot be reached or a proxy speaks for it. */
  async #get(path) {
    const headers = this.hasKey ? { Authorization: `Bearer ${this.#key}` } : {};
    const response = await fetch(path, { cache: "no-store", headers }).catch(() => null);
    return response && response.status !== 502 && response.status !== 504 ? response : null;
  }
}

function base64url(text) {
  const binary = String.fromCharCode(...new TextEncoder().encode(text));
  return btoa(binary).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}
