// The panel of curves: smoothing, axis, comparison of runs, and every other metric on request.

import { Chart } from "./chart.js";
import { CURVES } from "./curve_list.js";
import { byId, el, emptyState, select } from "./dom.js";
import { number, seconds } from "./format.js";
import { nearest, smoothed } from "./series.js";
import { lineColour, onThemeChange } from "./theme.js";

const SMOOTHING_KEY = "rolemesh.smoothing";
const AXES = {
  step: { unit: "step", format: number },
  time: { unit: "after", format: seconds },
};

export class Curves {
  /** onChooseStep(step): the reader wants to see that step elsewhere too. onWantAll(): all metrics. */
  constructor({ onChooseStep, onWantAll }) {
    this.runs = [];
    this.marks = [];
    this.axis = "step";
    this.smoothing = Number(sessionStorage.getItem(SMOOTHING_KEY) ?? 0.5);
    this.charts = new Map();
    this.others = new Map();
    this.pending = null;
    this.onChooseStep = onChooseStep;
    this.grid = el("div", { class: "charts" });
    this.otherGrid = el("div", { class: "charts" });
    this.filter = el("input", {
      type: "search", placeholder: "filter by name", "aria-label": "Filter other metrics",
      oninput: () => this.renderOthers(),
    });
    this.more = el("details", { class: "more", ontoggle: () => this.more.open && onWantAll() },
      el("summary", {}, "All other metrics"), this.filter, this.otherGrid);
    this.empty = emptyState("No step has been made yet.", "Curves begin with the first one.");
    byId("curves-body").append(this.empty, this.grid, this.more);
    this.addTools();
    onThemeChange(() => this.render());
    new ResizeObserver(() => this.render()).observe(this.grid);
  }

  addTools() {
    const shown = el("output", {}, this.smoothing.toFixed(2));
    this.slider = el("input", {
      type: "range", min: "0", max: "0.99", step: "0.01", value: this.smoothing, id: "smoothing",
      oninput: () => {
        this.smoothing = Number(this.slider.value);
        sessionStorage.setItem(SMOOTHING_KEY, this.slider.value);
        shown.textContent = this.smoothing.toFixed(2);
        this.render();
      },
    });
    const axis = select("Horizontal axis", [["step", "by step"], ["time", "by time"]], (chosen) => { this.axis = chosen; this.render(); });
    byId("curves-tools").append(
      el("label", { for: "smoothing" }, "smoothing"), this.slider, shown, axis);
  }

  /** runs: [{id, history}], the chosen run first; marks: [{step, text}] of that one. */
  setRuns(runs, marks) {
    this.runs = runs;
    this.marks = marks;
    this.render();
  }

  /** Draws before the next frame, once, however often it is asked. */
  render() {
    this.pending ??= requestAnimationFrame(() => {
      this.pending = null;
      this.renderNow();
    });
  }

  renderNow() {
    const histories = this.runs.map((run) => run.history);
    this.empty.hidden = histories.some((history) => history.steps.length > 0);
    this.more.hidden = !this.empty.hidden;
    this.prepareRuns();
    for (const spec of CURVES) this.renderChart(this.charts, this.grid, spec);
    if (this.more.open) this.renderOthers();
    else this.drawAll(this.charts);
  }

  drawAll(charts) {
    const measured = [...charts.values()].map((chart) => [chart, chart.plot.clientWidth]);
    for (const [chart, width] of measured) chart.draw(width);
  }

  /** Each run's xs, and the places of the marks, once for all charts. */
  prepareRuns() {
    this.xs = this.runs.map(({ history }) => (this.axis === "time" ? history.elapsed() : history.steps));
    const steps = this.runs[0]?.history.steps ?? [];
    this.placed = steps.length === 0 ? []
      : this.marks.map(({ step, text }) => ({ x: this.xs[0][nearest(steps, step)], text }));
  }

  renderOthers() {
    const known = new Set(CURVES.flatMap((curve) => this.linesOf(curve)).map((line) => line.name));
    const wanted = this.filter.value.trim().toLowerCase();
    const names = this.runs.length === 0 ? [] : this.runs[0].history.names
      .filter((name) => !known.has(name) && name.toLowerCase().includes(wanted)).sort();
    for (const [title, chart] of this.others) {
      if (!names.includes(title)) {
        chart.element.remove();
        this.others.delete(title);
      }
    }
    for (const name of names) {
      this.renderChart(this.others, this.otherGrid, { title: name, lines: [{ name, label: name }] });
    }
    this.drawAll(new Map([...this.charts, ...this.others]));
  }

  renderChart(charts, grid, spec) {
    const lines = this.drawnLines(spec);
    let chart = charts.get(spec.title);
    if (chart === undefined) {
      if (lines.length === 0) return;
      chart = new Chart(spec, {
        onCursor: (x) => this.moveCursor(x),
        onChoose: (row) => this.onChooseStep(this.runs[0].history.steps[row]),
      });
      charts.set(spec.title, chart);
      // In the order of the list, also for a metric that appears later.
      const order = CURVES.map((curve) => curve.title);
      const next = [...charts.values()].find((other) =>
        order.indexOf(other.spec.title) > order.indexOf(spec.title));
      grid.insertBefore(chart.element, next && order.includes(spec.title) ? next.element : null);
    }
    chart.setData(lines, AXES[this.axis], this.placed);
  }

  linesOf(spec) {
    if (spec.prefix === undefined) return spec.lines;
    const names = this.runs.length === 0 ? [] : this.runs[0].history.names;
    return names.filter((name) => name.startsWith(spec.prefix) && name !== spec.except
      && !name.endsWith("/standard_error"))
      .map((name) => ({
        name,
        label: name.slice(spec.prefix.length).replaceAll("_", " "),
        spread: name.replace(/\/score$/, "/standard_error"),
      })).map((line) => (line.spread === line.name ? { ...line, spread: undefined } : line));
  }

  /** Of one run, lines differ by colour; of several, runs do, and lines by dashes. */
  drawnLines(spec) {
    const compares = this.runs.length > 1 && !spec.stacked;
    const drawn = [];
    const runs = spec.stacked ? this.runs.slice(0, 1) : this.runs;
    runs.forEach(({ id, history }, runPlace) => {
      this.linesOf(spec).forEach((line, linePlace) => {
        const raw = history.values(line.name);
        if (raw === undefined || (compares && linePlace > 1)) return;
        drawn.push({
          name: line.name,
          label: compares ? (linePlace > 0 ? `${id} ${line.label}` : id) : line.label,
          color: lineColour(compares ? runPlace : linePlace),
          dash: compares && linePlace > 0,
          xs: this.xs[runPlace],
          raw,
          shown: spec.stacked ? raw : smoothed(raw, this.smoothing),
          ...(compares ? {} : this.band(history, line, raw)),
        });
      });
    });
    return drawn;
  }

  band(history, line, raw) {
    const spread = line.spread && history.values(line.spread);
    if (spread) {
      const middle = smoothed(raw, this.smoothing);
      const wide = smoothed(spread, this.smoothing);
      return {
        low: middle.map((value, row) => value - wide[row]),
        high: middle.map((value, row) => value + wide[row]),
      };
    }
    const [low, high] = [history.values(line.low), history.values(line.high)];
    return low && high
      ? { low: smoothed(low, this.smoothing), high: smoothed(high, this.smoothing) } : {};
  }

  /** All charts show the same place. */
  moveCursor(x) {
    for (const chart of [...this.charts.values(), ...this.others.values()]) chart.setCursor(x);
  }
}
