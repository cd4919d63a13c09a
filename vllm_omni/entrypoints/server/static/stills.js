// Fall-back without Media Source Extensions: the first picture of every chunk, where the browser
// can decode one.

import { codecName, decoderConfig, firstSample } from "./fmp4.js";

export class Stills {
  #canvas;
  #decoder = null;

  constructor(canvas) {
    this.#canvas = canvas;
  }

  /** Whether this browser decodes the codec of an init segment picture by picture. */
  async start(init) {
    this.stop();
    if (!("VideoDecoder" in globalThis)) return false;
    const description = decoderConfig(init);
    const config = { codec: codecName(description), description };
    const { supported } = await VideoDecoder.isConfigSupported(config);
    if (!supported) return false;
    this.#decoder = new VideoDecoder({
      output: (frame) => this.#draw(frame),
      error: () => this.stop(),
    });
    this.#decoder.configure(config);
    return true;
  }

  /** Show the first picture of a chunk. */
  push(bytes) {
    const data = this.#decoder && firstSample(bytes);
    if (!data) return;
    this.#decoder.decode(new EncodedVideoChunk({ type: "key", timestamp: 0, data }));
    this.#decoder.flush().catch(() => this.stop());
  }

  stop() {
    if (this.#decoder && this.#decoder.state !== "closed") this.#decoder.close();
    this.#decoder = null;
  }

  #draw(frame) {
    this.#canvas.width = frame.displayWidth;
    this.#canvas.height = frame.displayHeight;
    this.#canvas.getContext("2d").drawImage(frame, 0, 0);
    frame.close();
  }
}
