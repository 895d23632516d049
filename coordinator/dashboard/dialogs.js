// Questions to the operator: the token, and whether to stop.

import { byId } from "./dom.js";

/** Asks for the token; resolves with it once it is given. */
export function askForToken() {
  const dialog = byId("token");
  const input = byId("token-input");
  input.value = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      if (input.value) resolve(input.value);
      else resolve(askForToken());
    }, { once: true });
  });
}

/** Asks before something that cannot be taken back; resolves with whether it is wanted. */
export function confirmed(question) {
  const dialog = byId("confirm");
  byId("confirm-text").textContent = question;
  dialog.returnValue = "cancel";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}
