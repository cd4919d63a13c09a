// The first picture: a drawn scene, a chosen file or a dropped one, as a data URL.

const MAX_SIDE = 1920;
const MAX_DATA_URL = 3_000_000;
const JPEG_QUALITY = 0.92;
const PREVIEW_WIDTH = 832;
const MAX_SCENE_SIDE = 2048;

export class Picture {
  #file = null;
  #scene = null;
  #changed;
  url = "";
  previewUrl = "";

  /** @param {() => void} changed called whenever another picture is chosen */
  constructor(changed) {
    this.#changed = changed;
  }

  /** Take a scene that the server draws. */
  useScene(name, { width, height }) {
    this.#file = null;
    this.#scene = name;
    const address = (times) =>
      `scenes/${name}.png?width=${width * times}&height=${height * times}`;
    // The model gets the scene at its own size; the screen gets one that is sharp on it.
    const times = Math.max(1, Math.ceil(PREVIEW_WIDTH / width));
    const fits = times * Math.max(width, height) <= MAX_SCENE_SIDE;
    this.#show(address(1), address(fits ? times : 1));
  }

  /** Take a file. */
  useFile(file) {
    this.#scene = null;
    this.#file = file;
    const url = URL.createObjectURL(file);
    this.#show(url, url);
  }

  /** Name of the file, or null. */
  get fileName() {
    return this.#file?.name ?? null;
  }

  /** Name of the drawn scene, or null. */
  get sceneName() {
    return this.#scene;
  }

  /** The picture as a data URL that fits into a start message. */
  async dataUrl() {
    const blob = this.#file ?? (await sceneFile(this.url, this.#scene));
    const url = await readDataUrl(blob);
    if (url.length <= MAX_DATA_URL) return url;
    const smaller = await reduced(blob);
    return smaller ? readDataUrl(smaller) : url;
  }

  #show(url, previewUrl) {
    if (this.url.startsWith("blob:")) URL.revokeObjectURL(this.url);
    this.url = url;
    this.previewUrl = previewUrl;
    this.#changed();
  }
}

async function sceneFile(url, name) {
  const response = await fetch(url);
  if (!response.ok) throw new Error(`The server did not draw the scene ${name}.`);
  return response.blob();
}

function readDataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error("The picture could not be read."));
    reader.readAsDataURL(blob);
  });
}

/** A smaller JPEG, or null where the browser does not know the format: the server may. */
async function reduced(blob) {
  const bitmap = await createImageBitmap(blob).catch(() => null);
  if (!bitmap) return null;
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.round(bitmap.width * scale);
  canvas.height = Math.round(bitmap.height * scale);
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  return new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", JPEG_QUALITY));
}
