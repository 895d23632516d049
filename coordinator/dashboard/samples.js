// Samples of a step: a list of rows, and one of them with its tokens.

import { byId, el, emptyState, keyed, select, setText } from "./dom.js";
import { count, number } from "./format.js";
import { branchesOf, branchName, sessionBlocks, together, turnsOf } from "./sessions.js";
import { tokenCells, tokenLegend } from "./tokens.js";

const SNIPPET = 160;
const IMAGE_URL = /^data:image\/(png|jpeg|webp);base64,/;
const ORDERS = {
  row: (a, b) => a.row - b.row,
  best: (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity),
  worst: (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity),
};

export class Samples {
  /** onStep(step): shows samples of that step; 0 follows the run. */
  constructor({ onStep }) {
    this.onStep = onStep;
    this.answer = null;
    this.row = null;
    this.colouredBy = "logprob";
    this.step = select("Step of the samples", [], (step) => onStep(Number(step)));
    this.order = select("Order of the samples", [["row", "by row"], ["best", "best first"], ["worst", "worst first"]], () => this.render());
    this.colours = select("Colour of tokens", [["logprob", "tokens by log-prob"], ["advantage", "tokens by advantage"]],
      (colouredBy) => { this.colouredBy = colouredBy; this.renderDetail(); });
    byId("samples-tools").append(this.step, this.order, this.colours);
    this.empty = emptyState("No samples are kept yet.", "Some of each step's completions appear here once it is made.");
    this.list = el("div", { class: "sample-list", role: "listbox", "aria-label": "Samples", onkeydown: (event) => this.key(event) });
    this.detail = el("div", { class: "sample-detail" });
    this.box = el("div", { class: "samples" }, this.list, this.detail);
    byId("samples-body").append(this.empty, this.box);
    this.show(null, true);
  }

  /** answer: of GET .../samples, or null where there is none. */
  show(answer, isFollowing) {
    this.answer = answer;
    this.isFollowing = isFollowing;
    const isEmpty = answer === null || answer.samples.length === 0;
    this.empty.hidden = !isEmpty;
    this.box.hidden = isEmpty;
    this.step.disabled = this.order.disabled = this.colours.disabled = isEmpty;
    if (isEmpty) return;
    const steps = [...answer.steps].reverse();
    this.step.replaceChildren(
      el("option", { value: 0 }, `newest (step ${count(isFollowing ? answer.step : steps[0])})`),
      ...steps.map((step) => el("option", { value: step }, `step ${count(step)}`)));
    this.step.value = isFollowing ? "0" : String(answer.step);
    this.render();
  }

  render() {
    const samples = together([...this.answer.samples].sort(ORDERS[this.order.value]));
    if (!samples.some((sample) => sample.row === this.row)) this.row = samples[0].row;
    const rewards = samples.map((sample) => sample.reward ?? 0);
    const largest = Math.max(...rewards.map(Math.abs), 1e-9);
    keyed(this.list, samples, (sample) => sample.row, () => this.makeItem(), (item, sample) => {
      const [reward, text] = item.children;
      const isChosen = sample.row === this.row;
      setText(reward, number(sample.reward));
      reward.className = `sample-reward ${(sample.reward ?? 0) > 0 ? "good" : "bad"}`;
      reward.style.setProperty("--share", String(Math.abs(sample.reward ?? 0) / largest));
      const [prompt, completion, branch] = text.children;
      setText(prompt, sample.prompt.trim().slice(0, SNIPPET));
      setText(completion, sample.completion.trim().slice(0, SNIPPET) || "empty completion");
      setText(branch, branchName(sample));
      item.classList.toggle("follows", (sample.session?.branch ?? 0) > 0);
      item.setAttribute("aria-selected", String(isChosen));
      item.tabIndex = isChosen ? 0 : -1;
      item.dataset.row = sample.row;
    });
    this.renderDetail();
  }

  makeItem() {
    const item = el("div", { role: "option", class: "sample-item" }, el("span"), el("span", { class: "sample-text" }, el("span", { class: "quiet" }), el("span"), el("span", { class: "quiet" })));
    item.addEventListener("click", () => this.choose(Number(item.dataset.row)));
    return item;
  }

  choose(row) {
    this.row = row;
    this.render();
    this.list.querySelector("[aria-selected=true]")?.focus();
  }

  key(event) {
    const moves = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" };
    const next = event.key in moves ? event.target[moves[event.key]] : null;
    if (next === null || next === undefined) return;
    event.preventDefault();
    this.choose(Number(next.dataset.row));
  }

  renderDetail() {
    const sample = this.answer?.samples.find((one) => one.row === this.row);
    if (sample === undefined) return;
    // A refresh without a change must not take the selection of text or the focus away.
    const key = `${this.answer.step} ${sample.row} ${this.colouredBy}`;
    const told = JSON.stringify(branchesOf(sample, this.answer.samples));
    if (this.shownKey === key && this.shown === told) return;
    [this.shownKey, this.shown] = [key, told];
    const own = sample.logprobs.filter((_, place) => sample.loss_mask[place] !== false);
    const mean = own.reduce((sum, value) => sum + (value ?? 0), 0) / (own.length || 1);
    const { session } = sample;
    const turns = turnsOf(sample, this.answer.samples);
    const facts = [
      ["reward", number(sample.reward)], ["row", count(sample.row)],
      ["version", count(sample.policy_version)], ["tokens", count(sample.token_ids.length)],
      ["mean log-prob", own.length ? number(mean) : "\u2013"],
      ...(session ? [["session", `prompt ${session.prompt_id}, sample ${count(session.sample_index)}`]] : []),
      ...(branchName(sample) ? [["branch", branchName(sample).replace("branch ", "")]] : []),
      ...(session?.attempts > 1 ? [["attempts", count(session.attempts)]] : []),
      ...Object.entries(sample.reward_parts ?? {}).map(([name, value]) => [name, number(value)]),
    ];
    this.detail.replaceChildren(
      el("dl", { class: "facts" }, ...facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
      block("Prompt", sample.prompt), ...imagesOf(sample, this.answer.samples), block("Completion", sample.completion),
      sample.answer ? block("Expected answer", sample.answer) : el("span"),
      el("h3", {}, `Tokens by ${this.colouredBy === "advantage" ? "advantage" : "log-prob"}`),
      tokenCells(sample, this.colouredBy, turns), tokenLegend(this.colouredBy),
      ...sessionBlocks(sample, this.answer.samples).filter((block) => block !== null));
  }
}

/** The images of a prompt; those that are not shown by their digest and size. */
function imagesOf(sample, samples) {
  const images = sample.images ?? [];
  if (images.length === 0 && !sample.has_large_images) return [];
  // A file that several samples show is carried by the first of them.
  const carried = new Map(samples.flatMap((one) => one.images ?? []).filter((one) => IMAGE_URL.test(one.url)).map((one) => [one.sha256, one.url]));
  const shown = images.map((image, place) => {
    const name = `image ${place + 1} of ${images.length}, ${image.sha256.slice(0, 12)}, ${count(image.num_bytes)} bytes`;
    return el("figure", {}, carried.has(image.sha256) ? el("img", { src: carried.get(image.sha256), alt: name }) : null, el("figcaption", {}, name));
  });
  const large = sample.has_large_images ? el("p", { class: "quiet" }, "The images of this prompt are too large to be shown.") : null;
  return [el("div", { class: "text-block" }, el("h3", {}, "Images"), el("div", { class: "prompt-images" }, ...shown), large)];
}

function block(title, text) {
  return el("div", { class: "text-block" }, el("h3", {}, title), el("pre", { tabindex: "0", "aria-label": title }, text));
}
