// What a run recovers from, and where it went on before: after failures, and in another process.

import { count, seconds } from "./format.js";

export class Recoveries {
  constructor() {
    this.clear();
  }

  clear() {
    this.marks = []; // {step, text}, oldest first.
    this.now = null; // {since, cause} of the recovery in progress.
  }

  /** Takes an event; returns whether a mark came. */
  add({ kind, event }) {
    if (kind === "state") {
      const isOver = event.state.state !== "recovering";
      // Its attempts follow each other: the first one began it.
      this.now = isOver ? null : { since: this.now?.since ?? Date.parse(event.time), cause: event.state.failure };
    }
    const text = markOf(kind, event);
    if (text === null) return false;
    this.marks.push({ step: event[kind].step, text });
    return true;
  }
}

/** A line for the list of events. */
export function lineOf(kind, event) {
  if (kind === "resumed") return `resumed from ${event.resumed.where}`;
  const { cause, seconds: lasted, restarted, lost_steps: lost } = event.recovered;
  const again = lost > 0 ? `; ${count(lost)} ${lost === 1 ? "step is" : "steps are"} made again` : "";
  return `recovered in ${seconds(lasted)} from: ${cause}; loaded anew: ${restarted.join(", ") || "no service"}${again}`;
}

function markOf(kind, event) {
  if (kind === "recovered") return `recovered after step ${count(event.recovered.step)}`;
  return kind === "resumed" ? `resumed after step ${count(event.resumed.step)}` : null;
}
