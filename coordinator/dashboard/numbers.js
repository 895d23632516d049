// The newest values of the main metrics, compared with earlier ones.

import { byId, el, keyed, setText } from "./dom.js";
import { number, percent, seconds } from "./format.js";

const BACK = 10;
const TILES = [
  { name: "reward/mean", label: "Reward" },
  { name: "held_out/score", label: "Held-out score" },
  { name: "held_out/loss", label: "Held-out loss" },
  { name: "held_out/preference_accuracy", label: "Held-out accuracy", format: percent },
  { name: "kl/mean", label: "KL", unit: "nats" },
  { name: "entropy", label: "Entropy", unit: "nats" },
  { name: "completion_length/mean", label: "Completion", unit: "tokens" },
  { name: "time/step", label: "Step", format: seconds },
  { name: "tokens_per_second", label: "Throughput", unit: "tok/s" },
  { name: "staleness/max", label: "Steps behind" },
];

/** Shows each newest value, and how it differs from the mean of the ten before. */
export function showNumbers(history) {
  const tiles = TILES.filter((tile) => history.newest(tile.name) !== undefined);
  keyed(byId("numbers"), tiles, (tile) => tile.name,
    () => el("div", { class: "tile" }, el("span", { class: "quiet" }), el("b", {}, el("span"), el("small")), el("small", { class: "change" })),
    (box, tile) => {
      const format = tile.format ?? number;
      const values = history.values(tile.name).filter((value) => !Number.isNaN(value));
      const before = values.slice(-1 - BACK, -1);
      const [label, value, change] = box.children;
      setText(label, tile.label);
      setText(value.firstChild, format(values.at(-1)));
      setText(value.lastChild, tile.unit ? ` ${tile.unit}` : "");
      setText(change, before.length ? changeOf(values.at(-1), before) : "first value");
    });
}

function changeOf(now, before) {
  const mean = before.reduce((sum, value) => sum + value, 0) / before.length;
  const by = now - mean;
  const share = Math.abs(by / mean);
  if (by === 0 || share < 0.005) return `as in the last ${before.length}`;
  // For numbers around zero, a share says nothing.
  const isShare = share < 1 && before.every((value) => value > 0);
  return `${by > 0 ? "+" : "\u2212"}${isShare ? percent(share) : number(Math.abs(by))} to the last ${before.length}`;
}
