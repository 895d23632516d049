// The list of curves in their order, with the metrics of each.

import { percent, seconds } from "./format.js";

/** Each: title, unit, lines [{name, label}], and maybe a band {low, high} or {around, spread}. */
export const CURVES = [
  { title: "Reward", unit: "mean and deviation", lines: [{ name: "reward/mean", label: "mean", spread: "reward/std" }] },
  {
    title: "Held-out score", unit: "mean and standard error",
    lines: [{ name: "held_out/score", label: "score", spread: "held_out/standard_error" }],
  },
  { title: "Evaluated", unit: "mean and standard error, by rolemesh evaluate", prefix: "evaluated/", lines: [] },
  { title: "KL to reference", unit: "nats a token", lines: [{ name: "kl/mean", label: "KL" }] },
  { title: "Entropy", unit: "nats a token", zero: true, lines: [{ name: "entropy", label: "entropy" }] },
  {
    title: "Completion length", unit: "tokens: mean, least to most", zero: true,
    lines: [{
      name: "completion_length/mean", label: "mean",
      low: "completion_length/min", high: "completion_length/max",
    }],
  },
  {
    title: "Finished completions", unit: "share that ended by themselves", format: percent,
    lines: [{ name: "finished_fraction", label: "finished" }],
  },
  { title: "Policy loss", lines: [{ name: "policy_loss", label: "loss" }, { name: "kl_loss", label: "KL term" }] },
  { title: "Value loss", zero: true, lines: [{ name: "value_loss", label: "loss" }] },
  { title: "Loss", lines: [{ name: "loss", label: "loss" }, { name: "held_out/loss", label: "held out" }] },
  {
    title: "Pairs told apart", unit: "share", format: percent,
    lines: [
      { name: "preference_accuracy", label: "training" },
      { name: "held_out/preference_accuracy", label: "held out" },
    ],
  },
  {
    title: "Gradient norm", zero: true,
    lines: [
      { name: "actor/grad_norm", label: "actor" }, { name: "critic/grad_norm", label: "critic" },
      { name: "grad_norm", label: "all" },
    ],
  },
  {
    title: "Clipped tokens", unit: "share", zero: true, format: percent,
    lines: [
      { name: "clip_fraction_high", label: "above" }, { name: "clip_fraction_low", label: "below" },
      { name: "value_clip_fraction", label: "values" },
    ],
  },
  { title: "Change by an update", unit: "KL, nats a token", lines: [{ name: "approx_kl", label: "KL" }] },
  {
    title: "Trainer beside sampler", unit: "nats a token", zero: true,
    lines: [{ name: "sampler_logprob_diff_mean", label: "mean difference" }],
  },
  {
    title: "Value error explained", unit: "share of variance",
    lines: [{ name: "values/explained_variance", label: "explained" }],
  },
  {
    title: "Groups", unit: "per step", zero: true,
    lines: [{ name: "groups/count", label: "all" }, { name: "groups/all_equal", label: "with one reward" }],
  },
  { title: "Time by phase", unit: "seconds a step", stacked: true, format: seconds, prefix: "time/", except: "time/step", lines: [] },
  { title: "Throughput", unit: "tokens a second", zero: true, lines: [{ name: "tokens_per_second", label: "tokens" }] },
  {
    title: "Computed tokens", unit: "share of the rows' tokens", zero: true, format: percent,
    lines: [
      { name: "actor/computed_fraction", label: "actor" },
      { name: "critic/computed_fraction", label: "critic" },
      { name: "computed_fraction", label: "all" },
    ],
  },
  { title: "Staleness", unit: "steps behind, at most", zero: true, lines: [{ name: "staleness/max", label: "steps" }] },
];

/** What is asked of the coordinator at first: names of all curves, key numbers and rewards. */
export const WANTED = [
  ...new Set([
    ...CURVES.flatMap((curve) => curve.lines.flatMap((line) =>
      [line.name, line.spread, line.low, line.high].filter((name) => name !== undefined))),
    "time/*", "reward/*", "evaluated/*", "policy_version/max",
  ]),
];
