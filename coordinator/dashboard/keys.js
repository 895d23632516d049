// Keyboard shortcuts, and the dialog that lists them.

import { byId, el } from "./dom.js";

const PANELS = ["flow", "mesh", "devices", "curves", "samples", "events", "rewards", "logs"];

/** actions: {key: [what it does, function]}, besides those of panels and help. */
export function startKeys(actions) {
  const all = {
    "?": ["this help", showHelp],
    ...Object.fromEntries(PANELS.map((id, place) => [String(place + 1), [`go to ${id}`, () => goTo(id)]])),
    ...actions,
  };
  const rows = [...Object.entries(all).map(([key, [what]]) => [key, what]),
    ["arrows", "move along a chart, the devices, samples or tokens"], ["Enter", "on a chart: show that step"], ["Esc", "close"]];
  byId("help-keys").replaceChildren(...rows.map(([key, what]) => el("div", {}, el("dt", {}, el("kbd", {}, key)), el("dd", {}, what))));
  byId("help-button").addEventListener("click", showHelp);
  document.addEventListener("keydown", (event) => {
    const isTyping = event.target.closest("input:not([type=checkbox]):not([type=range]), select, textarea") !== null;
    if (isTyping || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    const action = all[event.key];
    if (action === undefined) return;
    event.preventDefault();
    action[1]();
  });
}

function showHelp() {
  byId("help").showModal();
}

function goTo(id) {
  const panel = byId(id);
  panel.scrollIntoView();
  panel.focus({ preventScroll: true });
}
