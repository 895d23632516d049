// Watches a run without end: after a broken connection it continues after the last event.

import { ApiError, events } from "./api.js";

const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 15000;
const FINAL_STATES = ["succeeded", "stopped", "failed"];

export function isFinal(state) {
  return FINAL_STATES.includes(state);
}

export class Watch {
  /**
   * onEvent({id, kind, event}); onStatus({name, retryAt, problem}) with name one of "connecting",
   * "live", "disconnected", "ended"; onExpired() when events that are wanted are no longer kept.
   */
  constructor(run, after, { onEvent, onStatus, onExpired }) {
    this.run = run;
    this.after = after;
    this.isOver = false; // Whether the newest state was a final one; a run that is resumed has more.
    this.handlers = { onEvent, onStatus, onExpired };
    this.stopping = new AbortController();
    this.hurry = () => undefined;
    window.addEventListener("online", () => this.hurry(), { signal: this.stopping.signal });
    this.loop();
  }

  stop() {
    this.stopping.abort();
    this.hurry();
  }

  async loop() {
    const { onStatus, onExpired } = this.handlers;
    let failures = 0;
    onStatus({ name: "connecting" });
    while (!this.stopping.signal.aborted) {
      let problem = "the coordinator ended the stream";
      try {
        let isOver = false;
        const opened = (hasNoMore) => {
          failures = 0;
          isOver = hasNoMore;
          onStatus({ name: "live" });
        };
        if ((await this.read(opened)) || isOver) {
          onStatus({ name: "ended" });
          return;
        }
      } catch (error) {
        if (this.stopping.signal.aborted) return;
        if (this.isOver) {
          onStatus({ name: "ended" }); // The coordinator of a single run ends with the run.
          return;
        }
        if (error instanceof ApiError && error.reason === "EVENTS_EXPIRED") {
          onExpired();
          return;
        }
        problem = error.message;
      }
      // Full jitter, so that many open pages do not return to a restarted coordinator all at once.
      const most = Math.min(LONGEST_WAIT_MS, FIRST_WAIT_MS * 2 ** failures);
      const wait = most * (0.5 + 0.5 * Math.random());
      failures += 1;
      onStatus({ name: "disconnected", retryAt: Date.now() + wait, problem });
      await this.pause(wait);
    }
  }

  /** Reads one connection to its end; whether the run's last event has come. */
  async read(opened) {
    for await (const event of events(this.run, this.after, this.stopping.signal, opened)) {
      if (event.kind === "problem") throw new ApiError(event.event.status, event.event);
      if (event.id) this.after = event.id;
      this.handlers.onEvent(event);
      if (event.kind === "state") this.isOver = isFinal(event.event.state.state);
    }
    return this.isOver;
  }

  pause(ms) {
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, ms);
      this.hurry = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }
}
