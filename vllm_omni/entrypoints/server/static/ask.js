// Questions to the viewer, each a dialog that answers a promise.

import { dom, durationWords } from "./view.js";

/** Whether the viewer agrees. */
export function agrees(question, { yes, no }) {
  dom.askText.textContent = question;
  dom.askYes.textContent = yes;
  dom.askNo.textContent = no;
  return answered(dom.ask, { decline: dom.askNo, read: () => true, otherwise: false });
}

/** The key that the viewer types, or null. */
export function keyFrom(words) {
  dom.keyText.textContent = words;
  dom.key.value = "";
  const read = () => dom.key.value.trim();
  return answered(dom.keyDialog, { decline: dom.keyNo, read, otherwise: null });
}

/** Offer several walks; `save(walk)` for each that is chosen. */
export function offerWalks(walks, save) {
  dom.walks.replaceChildren(...walks.map((walk) => walkLine(walk, save)));
  return answered(dom.walksDialog, { decline: dom.walksNo, read: () => null, otherwise: null });
}

function answered(dialog, { decline, read, otherwise }) {
  const form = dialog.querySelector("form");
  return new Promise((resolve) => {
    let answer = otherwise;
    form.onsubmit = (event) => {
      event.preventDefault();
      answer = read();
      dialog.close();
    };
    decline.onclick = () => dialog.close();
    dialog.onclose = () => resolve(answer);
    if (dialog.open) dialog.close();
    dialog.showModal();
  });
}

function walkLine(walk, save) {
  const line = document.createElement("li");
  const words = document.createElement("span");
  words.textContent = `${walk.name}, ${durationWords(walk.seconds)}, from ${walk.begun.toTimeString().slice(0, 5)}`;
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Save";
  button.ariaLabel = `Save ${words.textContent}`;
  button.onclick = () => save(walk);
  line.append(words, button);
  return line;
}
