// One small window with numbers beside the element under the pointer or with the focus.

import { byId, el } from "./dom.js";

const GAP = 8;

/** Shows a title and rows [name, value] beside an anchor: an element, or {x, y} of the viewport. */
export function showTip(anchor, title, rows) {
  const tip = byId("tip");
  const list = el("dl");
  for (const [name, value] of rows) list.append(el("dt", {}, name), el("dd", {}, value));
  tip.replaceChildren(el("strong", {}, title), list);
  tip.hidden = false;
  const box = anchor instanceof Element
    ? anchor.getBoundingClientRect()
    : { left: anchor.x, right: anchor.x, top: anchor.y, bottom: anchor.y };
  const { width, height } = tip.getBoundingClientRect();
  const left = Math.min(Math.max(GAP, box.left), document.documentElement.clientWidth - width - GAP);
  const below = box.bottom + GAP;
  const top = below + height < window.innerHeight ? below : Math.max(GAP, box.top - height - GAP);
  tip.style.left = `${left}px`;
  tip.style.top = `${top}px`;
}

export function hideTip() {
  byId("tip").hidden = true;
}

/** Shows on hover and focus what `tell()` gives as [title, rows]. */
export function giveTip(node, tell) {
  const show = () => showTip(node, ...tell());
  node.addEventListener("pointerenter", show);
  node.addEventListener("focus", show);
  node.addEventListener("pointerleave", hideTip);
  node.addEventListener("blur", hideTip);
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") hideTip();
});
document.addEventListener("scroll", hideTip, { passive: true });
