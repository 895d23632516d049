// Health of outside reward services, from the metrics of each step.

import { byId, el, emptyState, scrolled } from "./dom.js";
import { count, number, seconds } from "./format.js";

// Name of the metric, heading, how it is written, and from which value on it is marked.
const COLUMNS = [
  ["mean", "mean", number],
  ["std", "spread", number],
  ["latency_p50_seconds", "p50", seconds],
  ["latency_p99_seconds", "p99", seconds],
  ["errors", "errors", count, 1],
  ["retries", "retries", count, 1],
  ["hedged", "hedged", count],
  ["cache_hits", "cached", count],
  ["queue", "queue", count],
  ["queue_peak", "queue peak", count],
  ["dropped_rows", "rows dropped", count, 1],
];

export class Rewards {
  constructor() {
    this.empty = emptyState("All rewards of this run come from inside.",
      "Those that are asked over the network show their latency, errors and retries here.");
    this.box = scrolled("Reward services");
    byId("rewards-body").append(this.empty, this.box);
  }

  render(history) {
    const rewards = new Map();
    for (const name of history.names) {
      const parts = /^reward\/(.+)\/([a-z0-9_]+)$/.exec(name);
      if (parts === null) continue;
      if (!rewards.has(parts[1])) rewards.set(parts[1], new Map());
      rewards.get(parts[1]).set(parts[2], history.values(name).at(-1));
    }
    this.empty.hidden = rewards.size > 0;
    this.box.hidden = rewards.size === 0;
    byId("main").classList.toggle("has-rewards", rewards.size > 0);
    const columns = COLUMNS.filter(([name]) => [...rewards.values()].some((values) => values.has(name)));
    this.box.replaceChildren(el("table", {},
      el("caption", { class: "quiet" }, "In the newest step"),
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Reward"), ...columns.map(([, head]) => el("th", { scope: "col", class: "right" }, head)))),
      el("tbody", {}, ...[...rewards].map(([reward, values]) => el("tr", {}, el("th", { scope: "row" }, reward),
        ...columns.map(([name, , format, marked]) => el("td", {
          class: marked !== undefined && values.get(name) >= marked ? "right trouble" : "right",
        }, format(values.get(name)))))))));
  }
}
