// Events of the run, newest first: states, recoveries, checkpoints and notes. Steps and evaluations are in the
// curves; an evaluation also has a note.

import { byId, el } from "./dom.js";
import { clock, count, dateAndTime } from "./format.js";
import { lineOf } from "./recoveries.js";

const KEPT = 100;

export class Events {
  constructor() {
    this.list = byId("events-body");
    this.list.replaceChildren();
  }

  clear() {
    this.list.replaceChildren();
  }

  add({ kind, event }) {
    const text = textOf(kind, event);
    if (text === null) return;
    const when = new Date(event.time);
    this.list.prepend(el("li", { class: `event-${kind}` },
      el("time", { datetime: event.time, title: dateAndTime(when) }, clock(when)),
      el("span", { class: "quiet" }, `step ${count(event.step)}`), el("span", {}, text)));
    while (this.list.children.length > KEPT) this.list.lastElementChild.remove();
  }
}

/** A line for an event; null for those that other panels show. */
function textOf(kind, event) {
  if (kind === "state") return event.state.failure ? `${event.state.state}: ${event.state.failure}` : event.state.state;
  if (kind === "checkpoint_saved") return `checkpoint saved in ${event.checkpoint_saved.directory}`;
  if (kind === "note") return event.note.text;
  if (kind === "recovered" || kind === "resumed") return lineOf(kind, event);
  return null;
}
