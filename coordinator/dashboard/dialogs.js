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

/** Asks before something that cannot be taken back, with the words of the two buttons; resolves
 * with whether it is wanted. */
export function confirmed(question, yes, no) {
  const dialog = byId("confirm");
  byId("confirm-text").textContent = question;
  byId("confirm-yes").textContent = yes;
  byId("confirm-no").textContent = no;
  dialog.returnValue = "cancel";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}
