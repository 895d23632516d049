// A heat map of a mixture's experts: rows are layers, columns are experts, colour is the load.

import { byId, el, prepared, scrolled, select, setText, table } from "./dom.js";
import { count, number, percent } from "./format.js";
import { canvasFont, colour, faded, onThemeChange } from "./theme.js";
import { hideTip, showTip } from "./tip.js";

const [ROW, LOW_ROW, MANY] = [22, 12, 24]; // Rows of more layers than that are lower.
const AXIS = 18;
const FULL = 4; // Times the mean, or parts of it, from which on a colour is full.
const MARK = 34; // Pixels between two numbers of experts.
const MOST_CELLS = 16384; // A table of more would take seconds to lay out: it has the summary alone.
const SUMMARY = [["Layer"], ["Most", "right"], ["its expert", "right"], ["Least", "right"], ["its expert", "right"]];

export class Experts {
  /** onStep(step): shows loads of that step; 0 follows the run. */
  constructor({ onStep }) {
    this.role = select("Model whose experts are shown", [], (role) => { this.chosen = role; this.render(); });
    this.step = select("Step of the experts", [], (step) => onStep(Number(step)));
    this.tableButton = el("button", {
      type: "button", class: "small", "aria-expanded": "false", "aria-label": "Loads of experts as a table", onclick: () => this.toggleTable(),
    }, "table");
    const scale = el("span", { class: "load-scale", "aria-hidden": "true" }, `1/${FULL}`, el("i"), `${FULL} times the mean`);
    byId("experts-tools").append(scale, this.role, this.step, this.tableButton);
    this.told = el("p", { class: "quiet" });
    this.names = el("div", { class: "heat-names" });
    this.canvas = el("canvas", { "aria-hidden": "true" });
    this.plot = el("div", {
      class: "heat-plot", tabindex: "0", role: "img", "aria-label": "Loads of experts",
      onpointermove: (event) => this.point(event), onpointerleave: hideTip, onblur: hideTip,
      onkeydown: (event) => this.key(event),
    }, this.canvas);
    this.most = el("div", { class: "heat-newest" });
    this.box = el("div", { class: "heat" }, this.names, this.plot, this.most);
    this.table = scrolled("Loads of experts");
    this.table.classList.add("chart-table");
    this.table.hidden = true;
    byId("experts-body").append(this.told, this.box, this.table);
    onThemeChange(() => this.draw());
    new ResizeObserver(() => this.draw()).observe(this.plot);
    this.clear();
  }

  clear() {
    [this.answer, this.steps, this.chosen, this.at] = [null, [], null, null];
    this.toggleTable(false);
    this.render();
  }

  /** Whether the run trains a mixture, as far as it is known. */
  get isShown() {
    return this.steps.length > 0;
  }

  /** Whether a step can be asked for; 0 always. */
  isKept(step) {
    return step === 0 || this.steps.includes(step);
  }

  /** answer: of GET .../experts, or null where the loads of the wanted step are not kept. */
  show(answer, wanted) {
    this.answer = answer;
    if (answer !== null) this.steps = answer.steps;
    const newest = this.steps.at(-1);
    this.step.replaceChildren(
      el("option", { value: 0 }, `newest (step ${count(newest)})`),
      ...[...this.steps].reverse().map((step) => el("option", { value: step }, `step ${count(step)}`)));
    if (!this.isKept(wanted)) this.step.prepend(el("option", { value: wanted }, `step ${count(wanted)}`));
    this.step.value = String(wanted);
    this.wanted = wanted;
    this.render();
  }

  render() {
    for (const id of ["experts", "experts-link"]) byId(id).hidden = !this.isShown;
    if (!this.isShown) return;
    const roles = this.answer?.roles ?? [];
    this.loads = roles.find((one) => one.role === this.chosen) ?? roles[0];
    const hasLoads = this.loads !== undefined;
    this.box.hidden = this.tableButton.hidden = !hasLoads;
    this.role.hidden = roles.length < 2;
    if (!hasLoads) {
      this.toggleTable(false);
      setText(this.told, `The loads of step ${count(this.wanted)} are not kept.`);
      return;
    }
    this.role.replaceChildren(...roles.map(({ role }) => el("option", { value: role }, role)));
    this.role.value = this.loads.role;
    this.rows = this.loads.layers.map(rowOf);
    const worst = this.rows.reduce((a, b) => (b.most > a.most ? b : a));
    setText(this.told, `Choices of each expert over the mean of its layer, of the ${this.loads.role} in step ${count(this.answer.step)}; 1 is even. ${worst.most > 0
      ? `Most uneven is layer ${worst.layer}: expert ${worst.mostExpert} has ${number(worst.most)} times the mean.` : "Nothing was chosen."}`);
    this.plot.setAttribute("aria-label", `Heat map of ${this.rows.length} layers and ${this.rows[0].loads.length} experts. ${this.told.textContent}`);
    if (!this.table.hidden) this.fillTable();
    this.draw();
  }

  draw() {
    const width = this.plot.clientWidth;
    if (!this.isShown || this.box.hidden || width === 0) return;
    this.rowHeight = this.rows.length > MANY ? LOW_ROW : ROW;
    this.box.style.setProperty("--row", `${this.rowHeight}px`);
    const [height, experts] = [this.rows.length * this.rowHeight, this.rows[0].loads.length];
    const cell = width / experts;
    const gap = cell > 6 ? 1 : 0; // Narrower cells would be gaps for the most part.
    const context = prepared(this.canvas, width, height + AXIS);
    this.rows.forEach(({ loads }, row) => loads.forEach((load, expert) => {
      const [name, strength] = shade(load);
      context.fillStyle = faded(name, strength);
      context.fillRect(expert * cell, row * this.rowHeight + 1, cell - gap, this.rowHeight - 2);
    }));
    context.font = canvasFont();
    context.fillStyle = colour("quiet");
    context.textAlign = "center";
    const every = Math.max(1, Math.ceil(MARK / cell));
    for (let expert = 0; expert < experts; expert += every) {
      const x = (expert + 0.5) * cell;
      const half = context.measureText(String(expert)).width / 2;
      if (x + half <= width) context.fillText(String(expert), Math.max(x, half), height + 14);
    }
    this.names.replaceChildren(...this.rows.map(({ layer }) => el("div", {}, `layer ${layer}`)));
    this.most.replaceChildren(...this.rows.map(({ most }) => el("div", { title: "most loaded expert" }, number(most))));
  }

  toggleTable(isWanted = this.table.hidden) {
    this.table.hidden = !isWanted;
    this.tableButton.setAttribute("aria-expanded", String(isWanted));
    if (isWanted) this.fillTable();
  }

  fillTable() {
    const numbers = this.rows[0].loads.map((_, expert) => expert);
    const isWhole = this.rows.length * numbers.length <= MOST_CELLS;
    const body = this.rows.map((row) => el("tr", {},
      el("th", { scope: "row" }, String(row.layer)),
      ...[number(row.most), row.mostExpert, number(row.least), row.leastExpert, ...(isWhole ? row.loads.map(number) : [])]
        .map((text) => el("td", { class: "right" }, String(text)))));
    const heads = isWhole ? numbers.map((expert) => [`expert ${expert}`, "right"]) : [];
    this.table.replaceChildren(table([...SUMMARY, ...heads], el("tbody", {}, ...body)));
  }

  point(event) {
    const box = this.plot.getBoundingClientRect();
    const expert = Math.floor(((event.clientX - box.left) / box.width) * this.rows[0].loads.length);
    this.tell(Math.floor((event.clientY - box.top) / this.rowHeight), expert, { x: event.clientX, y: event.clientY });
  }

  key(event) {
    const [row, expert] = this.at ?? [0, -1];
    const moves = { ArrowLeft: [row, expert - 1], ArrowRight: [row, expert + 1], ArrowUp: [row - 1, expert], ArrowDown: [row + 1, expert] };
    if (!(event.key in moves)) return;
    event.preventDefault();
    const experts = this.rows[0].loads.length;
    const at = [[moves[event.key][0], this.rows.length], [moves[event.key][1], experts]]
      .map(([place, length]) => Math.min(Math.max(place, 0), length - 1));
    const box = this.plot.getBoundingClientRect();
    this.tell(...at, { x: box.left + (at[1] / experts) * box.width, y: box.top + (at[0] + 1) * this.rowHeight });
  }

  tell(place, expert, anchor) {
    const row = this.rows[place];
    if (row === undefined || row.loads[expert] === undefined) return hideTip();
    this.at = [place, expert];
    return showTip(anchor, `layer ${row.layer} \u00b7 expert ${expert}`, [
      ["load", number(row.loads[expert])], ["choices", count(row.choices[expert])],
      ["of the layer's", percent(row.total > 0 ? row.choices[expert] / row.total : 0)],
    ]);
  }
}

/** A layer with its loads, choices over their mean; zeros where nothing was chosen. */
export function rowOf({ layer, choices }) {
  const total = choices.reduce((sum, value) => sum + value, 0);
  const loads = choices.map((value) => (total > 0 ? (value * choices.length) / total : 0));
  const [most, least] = [Math.max(...loads), Math.min(...loads)];
  return { layer, choices, total, loads, most, least, mostExpert: loads.indexOf(most), leastExpert: loads.indexOf(least) };
}

/** Colour and opacity of a load: none where it is even, alike for twice the mean and for half. */
export function shade(load) {
  const strength = Math.min(1, Math.abs(Math.log(load)) / Math.log(FULL));
  return [load < 1 ? "line-2" : "heat", strength];
}
