// Tokens of a completion as cells, coloured by log-prob or advantage.

import { el } from "./dom.js";
import { brief, number, percent } from "./format.js";
import { giveTip } from "./tip.js";

const SHOWN = 1024;
// Lower ends of probability classes, from unlikely tokens to certain ones.
const PROBABILITIES = [0, 0.01, 0.1, 0.3, 0.6, 0.9];

/** Cells of a sample, coloured by "logprob" or "advantage"; turns are those of an agent, or none. */
export function tokenCells(sample, colouredBy, turns = []) {
  const largest = Math.max(1e-9, ...(sample.advantages ?? []).map((value) => Math.abs(value ?? 0)));
  const cells = sample.token_ids.slice(0, SHOWN).map((id, place) => {
    const token = tokenOf(sample, place, turns);
    const grade = colouredBy === "advantage" ? advantageClass(token, largest) : probabilityClass(token);
    const cell = el("span", {
      class: `token ${grade}${token.isOwn ? "" : " foreign"}`, tabindex: place === 0 ? "0" : "-1",
      role: "listitem", "aria-label": told(token),
    }, String(id));
    giveTip(cell, () => [`token ${place + 1} of ${sample.token_ids.length}`, rowsOf(token)]);
    return cell;
  });
  const list = el("div", { class: "tokens", role: "list", "aria-label": "Tokens of the completion", onkeydown: walk }, ...(turns.length ? byCall(turns, cells) : byTurn(sample, cells)));
  const left = sample.token_ids.length - cells.length;
  if (left > 0) list.append(el("span", { class: "quiet" }, ` and ${left} more`));
  return list;
}

/** The cells with a heading before each turn, where there are several: the policy's and others'. */
function byTurn(sample, cells) {
  const isOwn = cells.map((_, place) => sample.loss_mask[place] !== false);
  if (!isOwn.includes(true) || !isOwn.includes(false)) return cells;
  let turn = 0;
  return cells.flatMap((cell, place) => {
    if (place > 0 && isOwn[place] === isOwn[place - 1]) return [cell];
    if (isOwn[place]) turn += 1;
    const name = isOwn[place] ? `turn ${turn}` : "not trained";
    return [el("span", { class: "turn-name", role: "presentation" }, name), cell];
  });
}

/** The same by the calls of an agent, which say why tokens take no part: another row may train them. */
function byCall(turns, cells) {
  return turns.filter((turn) => turn.start < Math.min(turn.stop, cells.length)).flatMap((turn) => [
    el("span", { class: "turn-name", role: "presentation" }, turn.name), ...cells.slice(turn.start, turn.stop)])
    .concat(cells.slice(turns.at(-1).stop));
}

/** What the colours mean. */
export function tokenLegend(colouredBy) {
  const entries = colouredBy === "advantage"
    ? [["adv-minus2", "worse than expected"], ["adv-0", "as expected"], ["adv-plus2", "better"]]
    : PROBABILITIES.map((from, place) => [
      `prob-${place}`, place === 0 ? "p < 1 %" : `\u2265 ${brief(percent(from))}`]);
  return el("p", { class: "token-legend quiet" },
    ...entries.map(([name, label]) => el("span", {}, el("i", { class: `token ${name}` }), label)),
    el("span", {}, el("i", { class: "token foreign" }), "takes no part in the loss"));
}

function tokenOf(sample, place, turns) {
  return {
    id: sample.token_ids[place],
    logprob: sample.logprobs[place] ?? NaN,
    advantage: sample.advantages?.[place] ?? NaN,
    isOwn: sample.loss_mask[place] !== false,
    why: turns.find((turn) => turn.start <= place && place < turn.stop)?.why || "not the policy's own",
  };
}

function probabilityClass(token) {
  if (Number.isNaN(token.logprob)) return "prob-none";
  const p = Math.exp(token.logprob);
  return `prob-${PROBABILITIES.findLastIndex((from) => p >= from)}`;
}

function advantageClass(token, largest) {
  if (Number.isNaN(token.advantage)) return "prob-none";
  const size = Math.abs(token.advantage) / largest;
  if (size < 0.1) return "adv-0";
  return `adv-${token.advantage < 0 ? "minus" : "plus"}${size < 0.5 ? 1 : 2}`;
}

function rowsOf(token) {
  const rows = [["id", String(token.id)], ["log-prob", number(token.logprob)], ["probability", percent(Math.exp(token.logprob))]];
  if (!Number.isNaN(token.advantage)) rows.push(["advantage", number(token.advantage)]);
  if (!token.isOwn) rows.push(["", `${token.why}: takes no part in the loss${token.why.startsWith("trained") ? " of this row" : ""}`]);
  return rows;
}

function told(token) {
  return `id ${token.id}, log-prob ${number(token.logprob)}${token.isOwn ? "" : `, ${token.why}`}`;
}

/** Arrow keys move from token to token: one stop of the tab key for all of them. */
function walk(event) {
  const moves = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" };
  if (!(event.key in moves)) return;
  let next = event.target[moves[event.key]];
  if (next?.classList.contains("turn-name")) next = next[moves[event.key]];
  if (!next?.classList.contains("token")) return;
  event.preventDefault();
  event.target.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}
