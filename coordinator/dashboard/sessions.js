// Sessions of agents: rows that are branches of one trajectory, their calls, and the agent's log.

import { el, scrolled, table } from "./dom.js";
import { count } from "./format.js";

const KEPT_OUT = "kept out of training";

/** Rows in a given order, but those of one session together: at the place of the first, by branch. */
export function together(samples) {
  const sessions = new Map();
  for (const sample of samples) {
    const key = keyOf(sample);
    if (!sessions.has(key)) sessions.set(key, []);
    sessions.get(key).push(sample);
  }
  return [...sessions.values()].flatMap((rows) => rows.sort((a, b) => (a.session?.branch ?? 0) - (b.session?.branch ?? 0)));
}

/** Rows of the same session among samples of one step, by branch; of other samples the row alone. */
export function branchesOf(sample, samples) {
  return sample.session ? together(samples.filter((one) => keyOf(one) === keyOf(sample))) : [sample];
}

/** "branch 2 of 3", or nothing where the session has one row. */
export function branchName(sample) {
  const { branch, num_branches: all } = sample.session ?? {};
  return all > 1 ? `branch ${count(branch + 1)} of ${count(all)}` : "";
}

/**
 * Turns of a completion, in order: {start, stop, name, why}. `why` tells why its tokens take no part
 * in the loss of this row, and is empty where they do. Between the policy's calls are others' words.
 */
export function turnsOf(sample, samples) {
  const turns = [];
  let at = 0;
  for (const [place, call] of (sample.session?.calls ?? []).entries()) {
    const start = at + (place > 0 ? call.num_added_tokens : 0);
    if (start > at) turns.push({ start: at, stop: start, name: "not trained", why: "not the policy's own" });
    at = start + call.num_sampled_tokens;
    const why = call.use === "trained" ? "" : call.use === "untrained" ? KEPT_OUT : `trained in ${trainedIn(call, sample, samples)}`;
    turns.push({ start, stop: at, name: `turn ${place + 1}, call ${call.number}${why && `: ${why}`}`, why });
  }
  return turns;
}

/** The calls of a whole session, each once, with the rows that have it; and what its agent wrote. */
export function sessionBlocks(sample, samples) {
  if (!sample.session) return [];
  const rows = branchesOf(sample, samples);
  const calls = new Map();
  for (const row of rows) {
    for (const call of row.session.calls) {
      if (!calls.has(call.number)) calls.set(call.number, { call, rows: [] });
      calls.get(call.number).rows.push(row.row);
    }
    for (const call of row.session.left_out) calls.set(call.number, { call, rows: [] });
  }
  const lines = [...calls.values()].sort((a, b) => a.call.number - b.call.number).map(({ call, rows: having }) => el("tr", {},
    el("th", { scope: "row" }, count(call.number)), el("td", { class: "right" }, count(call.num_sampled_tokens)),
    el("td", {}, having.length ? having.map(count).join(", ") : "none"),
    el("td", {}, call.use === "untrained" ? KEPT_OUT : call.use === "shared" ? "trained in an earlier row" : `trained in row ${count(having[0])}`)));
  const log = rows[0].session.log;
  return [
    el("div", { class: "session-calls" }, el("h3", {}, "Calls of the session"),
      scrolled("Calls of the session", table([["Call"], ["Tokens", "right"], ["In rows"], ["Training"]], el("tbody", {}, ...lines)))),
    log ? el("div", { class: "text-block session-log" }, el("h3", {}, "What the agent wrote"), el("pre", { tabindex: "0", "aria-label": "What the agent wrote" }, log)) : null,
  ];
}

function trainedIn(call, sample, samples) {
  const first = branchesOf(sample, samples).find((row) => row.session.calls.some((one) => one.number === call.number && one.use === "trained"));
  return first ? `row ${count(first.row)}` : "an earlier row";
}

function keyOf(sample) {
  const { session } = sample;
  return session ? `session ${session.prompt_id} ${session.sample_index}` : `row ${sample.row}`;
}
