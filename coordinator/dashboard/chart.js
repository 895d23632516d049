// One chart on a canvas: lines with bands, or a stack of areas; read by pointer, keys or as a table.

import { el, prepared, setText, table } from "./dom.js";
import { brief, number } from "./format.js";
import { extent, nearest, thinned, ticks } from "./series.js";
import { canvasFont, colour, faded } from "./theme.js";

const HEIGHT = 132;
const MARGIN = { top: 8, right: 8, bottom: 20 };
const TABLE_ROWS = 1000;

export class Chart {
  /**
   * spec: {title, unit, zero, stacked, format}. onCursor(x or null) is called when the reader
   * points at the chart, onChoose(row x) when a point is clicked.
   */
  constructor(spec, { onCursor, onChoose }) {
    this.spec = spec;
    this.format = spec.format ?? number;
    this.handlers = { onCursor, onChoose };
    this.lines = [];
    this.marks = [];
    this.xAxis = { format: number, unit: "step" };
    this.canvas = el("canvas", { "aria-hidden": "true" });
    this.cursor = el("div", { class: "cursor", hidden: true });
    this.legend = el("div", { class: "legend" });
    this.tableButton = el("button", {
      type: "button", class: "small", "aria-expanded": "false", onclick: () => this.toggleTable(),
      "aria-label": `${spec.title} as a table`,
    }, "table");
    this.table = el("div", { class: "chart-table", hidden: true, tabindex: "0", role: "region", "aria-label": `Values of ${spec.title}` });
    this.plot = el("div", {
      class: "plot", tabindex: "0", role: "img",
      onpointermove: (event) => this.point(event), onpointerleave: () => onCursor(null),
      onclick: (event) => this.choose(event), onkeydown: (event) => this.key(event),
      onblur: () => onCursor(null),
    }, this.canvas, this.cursor);
    this.element = el("figure", { class: spec.stacked ? "chart broad" : "chart", "data-chart": spec.title },
      el("figcaption", {}, el("strong", {}, spec.title), el("span", { class: "quiet" }, spec.unit ?? ""),
        this.tableButton),
      this.legend, this.plot, this.table);
  }

  /** lines: [{label, color, dash, xs, raw, shown, low, high}]; arrays are aligned with xs.
   * marks: [{x, text}], upright lines where something happened. */
  setData(lines, xAxis, marks) {
    this.lines = lines;
    this.marks = marks;
    this.xAxis = xAxis;
    this.element.hidden = lines.length === 0;
    this.legend.replaceChildren(...lines.map((line) => {
      const key = el("i", { class: `key${line.dash ? " dashed" : ""}` });
      key.style.borderColor = colour(line.color);
      line.readout = el("b");
      return el("span", {}, key, lines.length > 1 ? `${line.label} ` : "", line.readout);
    }));
    this.setCursor(null);
    if (!this.table.hidden) this.fillTable();
  }

  /** width: of the plot in pixels, measured by the caller for all charts at once: to measure after
   * each change of the page would lay it out anew each time. */
  draw(width) {
    if (width === 0 || this.lines.length === 0) return;
    const context = prepared(this.canvas, width, HEIGHT);
    const range = this.ranges();
    const marks = ticks(range.low, range.high, 4);
    context.font = canvasFont();
    const left = Math.ceil(Math.max(...marks.map((mark) => context.measureText(this.label(mark)).width))) + 10;
    const toX = (x) => left + ((x - range.first) / (range.last - range.first || 1)) * (width - left - MARGIN.right);
    const bottom = HEIGHT - MARGIN.bottom;
    const toY = (y) => bottom - ((y - range.low) / (range.high - range.low || 1)) * (bottom - MARGIN.top);
    this.scale = { toX, left, width, range };
    this.drawAxes(context, marks, toX, toY, left, width, bottom, range);
    context.save();
    context.beginPath();
    context.rect(left, 0, width - left, bottom + 1);
    context.clip();
    if (this.spec.stacked) this.drawStack(context, toX, toY);
    // The first line, that of the chosen run, lies on top.
    else for (const line of [...this.lines].reverse()) drawLine(context, line, toX, toY);
    for (const { x } of this.marks) stroke(context, [[toX(x), 0], [toX(x), bottom]], faded("warn", 0.8), 1, [2, 3]);
    context.restore();
    this.describe();
  }

  ranges() {
    const xs = this.lines.map((line) => line.xs);
    const first = Math.min(...xs.map((x) => x[0] ?? Infinity));
    const last = Math.max(...xs.map((x) => x.at(-1) ?? -Infinity));
    let [low, high] = this.spec.stacked
      ? [0, extent([totals(this.lines)])[1]]
      : extent(this.lines.flatMap((line) => [line.raw, line.low ?? [], line.high ?? []]));
    if (this.spec.zero && low > 0) low = 0;
    if (low > high || (this.spec.zero && high === 0)) [low, high] = [0, 1];
    // A constant line: in the middle of the plot, or near its top if the axis begins at zero.
    if (low === high) [low, high] = [low - (Math.abs(low) || 1) / 10, high + (Math.abs(high) || 1) / 10];
    const room = (high - low) * 0.04;
    return { first, last, low: low === 0 ? 0 : low - room, high: high + room };
  }

  drawAxes(context, marks, toX, toY, left, width, bottom, range) {
    context.lineWidth = 1;
    context.strokeStyle = colour("grid");
    context.fillStyle = colour("quiet");
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (const mark of marks) {
      const y = Math.round(toY(mark)) + 0.5;
      context.beginPath();
      context.moveTo(left, y);
      context.lineTo(width - MARGIN.right, y);
      context.stroke();
      context.fillText(this.label(mark), left - 6, y);
    }
    context.textBaseline = "alphabetic";
    for (const mark of ticks(range.first, range.last, Math.max(2, Math.floor(width / 60)))) {
      const text = brief(this.xAxis.format(mark));
      const half = context.measureText(text).width / 2;
      context.textAlign = "center";
      context.fillText(text, Math.min(Math.max(toX(mark), left + half), width - half - 2), bottom + 14);
    }
  }

  label(mark) {
    return mark === 0 ? "0" : brief(this.format(mark));
  }

  drawStack(context, toX, toY) {
    // Steps without a value, e.g. the evaluation before the first step, leave a gap.
    const isKnown = this.lines[0].raw.map((_, row) => this.lines.some((line) => !Number.isNaN(line.raw[row])));
    const below = isKnown.map((known) => (known ? 0 : NaN));
    for (const line of this.lines) {
      const top = line.raw.map((value, row) => below[row] + (Number.isNaN(value) ? 0 : value));
      const up = thinned(line.xs, top, toX, toY);
      const down = thinned(line.xs, below, toX, toY);
      context.beginPath();
      trace(context, [...up, ...down.reverse()]);
      context.fillStyle = faded(line.color, 0.75);
      context.fill();
      top.forEach((value, row) => { below[row] = value; });
    }
  }

  /** Shows the values at an x, or, without one, the newest. */
  setCursor(x) {
    for (const line of this.lines) {
      // A step without a value, e.g. between two evaluations, takes the value before it.
      const last = x === null ? line.raw.length - 1 : nearest(line.xs, x);
      const row = line.raw.findLastIndex((value, place) => place <= last && !Number.isNaN(value));
      const value = row < 0 ? NaN : line.raw[row];
      const spread = row >= 0 && line.high && !Number.isNaN(line.high[row])
        ? ` (${this.format(line.low[row])} to ${this.format(line.high[row])})` : "";
      setText(line.readout, `${this.format(value)}${x === null ? "" : spread}`);
    }
    this.at = x;
    this.cursor.hidden = x === null || this.scale === undefined;
    if (!this.cursor.hidden) {
      this.cursor.style.transform = `translateX(${this.scale.toX(x)}px)`;
      this.cursor.dataset.at = `${this.xAxis.unit} ${this.xAxis.format(x)}`;
      this.cursor.classList.toggle("near-end", this.scale.toX(x) > this.scale.width - 90);
    }
  }

  xUnder(event) {
    if (this.scale === undefined) return null;
    const { left, width, range } = this.scale;
    const at = event.clientX - this.plot.getBoundingClientRect().left;
    const share = (at - left) / (width - left - MARGIN.right);
    const xs = this.lines[0].xs;
    return xs[nearest(xs, range.first + share * (range.last - range.first))] ?? null;
  }

  point(event) {
    this.handlers.onCursor(this.xUnder(event));
  }

  choose(event) {
    const x = this.xUnder(event);
    if (x !== null) this.handlers.onChoose(nearest(this.lines[0].xs, x));
  }

  key(event) {
    const xs = this.lines[0]?.xs ?? [];
    const now = this.at === null || this.at === undefined ? xs.length - 1 : nearest(xs, this.at);
    const moves = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: xs.length - 1 };
    if (event.key === "Enter") this.handlers.onChoose(now);
    else if (event.key in moves) {
      const row = Math.min(Math.max(moves[event.key], 0), xs.length - 1);
      this.handlers.onCursor(xs[row] ?? null);
    } else return;
    event.preventDefault();
  }

  describe() {
    const told = this.lines.map((line) => {
      const [low, high] = extent([line.raw]);
      const newest = line.raw.findLast((value) => !Number.isNaN(value));
      return `${line.label}: newest ${this.format(newest)}, from ${this.format(low)} to ${this.format(high)}`;
    });
    const text = `${this.spec.title}${this.spec.unit ? `, ${this.spec.unit}` : ""}. ${told.join("; ")}. ${this.marks.map(({ text }) => `${text}. `).join("")}Arrow keys move along it.`;
    if (this.plot.getAttribute("aria-label") !== text) this.plot.setAttribute("aria-label", text);
  }

  toggleTable() {
    this.table.hidden = !this.table.hidden;
    this.tableButton.setAttribute("aria-expanded", String(!this.table.hidden));
    if (this.table.hidden) this.table.replaceChildren();
    else this.fillTable();
  }

  /** The newest rows first; raw values, whatever the smoothing. */
  fillTable() {
    const rows = new Map();
    this.lines.forEach((line, place) => line.xs.forEach((x, row) => {
      if (Number.isNaN(line.raw[row])) return;
      if (!rows.has(x)) rows.set(x, new Array(this.lines.length).fill(NaN));
      rows.get(x)[place] = line.raw[row];
    }));
    const newest = [...rows.entries()].sort((a, b) => b[0] - a[0]);
    const body = newest.slice(0, TABLE_ROWS).map(([x, values]) => el("tr", {},
      el("th", { scope: "row" }, this.xAxis.format(x)),
      ...values.map((value) => el("td", { "data-value": value }, this.format(value)))));
    const heads = [[this.xAxis.unit], ...this.lines.map((line) => [line.label])];
    this.table.replaceChildren(
      table(heads, el("tbody", {}, ...body)),
      newest.length > TABLE_ROWS ? el("p", { class: "quiet" }, `The newest ${TABLE_ROWS} of ${newest.length} rows.`) : "");
  }
}

function totals(lines) {
  return lines[0].raw.map((_, row) =>
    lines.reduce((sum, line) => sum + (Number.isNaN(line.raw[row]) ? 0 : line.raw[row]), 0));
}

function trace(context, points) {
  points.forEach(([x, y], place) => (place === 0 ? context.moveTo(x, y) : context.lineTo(x, y)));
}

function drawLine(context, line, toX, toY) {
  if (line.low && line.high) {
    context.beginPath();
    const up = thinned(line.xs, line.high, toX, toY);
    trace(context, [...up, ...thinned(line.xs, line.low, toX, toY).reverse()]);
    context.fillStyle = faded(line.color, 0.14);
    context.fill();
  }
  context.lineJoin = "bevel"; // Miters of a noisy line would be spikes beyond its values.
  if (line.shown !== line.raw) stroke(context, thinned(line.xs, line.raw, toX, toY), faded(line.color, 0.28), 1, []);
  const points = thinned(line.xs, line.shown, toX, toY);
  stroke(context, points, colour(line.color), 1.6, line.dash ? [5, 3] : []);
  if (points.length > 24) return;
  // With few points, e.g. held-out scores, each is shown as a dot.
  context.fillStyle = colour(line.color);
  for (const [x, y] of points) {
    context.beginPath();
    context.arc(x, y, 2.5, 0, 2 * Math.PI);
    context.fill();
  }
}

function stroke(context, points, style, width, dash) {
  context.beginPath();
  trace(context, points);
  context.strokeStyle = style;
  context.lineWidth = width;
  context.setLineDash(dash);
  context.stroke();
  context.setLineDash([]);
}
