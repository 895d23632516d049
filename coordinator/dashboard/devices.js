// A heat map of how busy devices were: rows are devices, columns are time.

import { byId, el, emptyState, prepared, select } from "./dom.js";
import { bytes, clock, percent } from "./format.js";
import { canvasFont, colour, faded, onThemeChange } from "./theme.js";
import { hideTip, showTip } from "./tip.js";

const [ROW, LOW_ROW, MANY] = [22, 14, 24]; // Rows of more devices than that are lower.
const CELL = 4; // Pixels; narrower columns could not be seen, so they are merged.
const AXIS = 18;
const SPANS = [[5, "5 minutes"], [15, "15 minutes"], [60, "1 hour"]];
const MARKS_S = [5, 10, 15, 30, 60, 120, 300, 600, 900, 1800];
const KEPT_MS = 3600e3;
const GAP_MS = 15e3; // Longest time between two looks; a longer one is shown as a gap.

export class Devices {
  constructor() {
    this.devices = new Map();
    this.minutes = 15;
    this.shows = "busy";
    this.span = select("Time shown", SPANS, (minutes) => { this.minutes = Number(minutes); this.draw(); });
    this.span.value = this.minutes;
    this.what = select("What is shown", [["busy", "busy"], ["memory", "memory"]], (shows) => { this.shows = shows; this.draw(); });
    const scale = el("span", { class: "heat-scale", "aria-hidden": "true" }, "0 %", el("i"), "100 %");
    byId("devices-tools").append(scale, this.what, this.span);
    this.empty = emptyState("No service has told of its devices yet.", "They do once they hold a run.");
    this.names = el("div", { class: "heat-names" });
    this.canvas = el("canvas", { "aria-hidden": "true" });
    this.plot = el("div", {
      class: "heat-plot", tabindex: "0", role: "img",
      onpointermove: (event) => this.point(event), onpointerleave: hideTip, onblur: hideTip,
      onkeydown: (event) => this.key(event),
    }, this.canvas);
    this.newest = el("div", { class: "heat-newest" });
    this.box = el("div", { class: "heat" }, this.names, this.plot, this.newest);
    byId("devices-body").append(this.empty, this.box);
    onThemeChange(() => this.draw());
    new ResizeObserver(() => this.draw()).observe(this.plot);
    this.draw();
  }

  clear() {
    this.devices.clear();
    this.draw();
  }

  /** The time to ask from, RFC 3339; empty for all that there is. */
  get since() {
    const newest = Math.max(0, ...[...this.devices.values()].map((device) => device.times.at(-1) ?? 0));
    return newest === 0 ? "" : new Date(newest + 1).toISOString();
  }

  /** The newest look at each device of a service: [{rank, device, busy, memory, total}]. */
  of(service) {
    return [...this.devices.values()].filter((device) => device.service === service).map((device) => ({
      rank: device.rank, device: device.device, busy: device.busy.at(-1),
      memory: device.memory.at(-1), total: device.total,
    }));
  }

  /** Takes an answer of GET .../devices: what came since the last one. */
  add({ devices }) {
    for (const use of devices) {
      const key = `${use.service} ${use.rank} ${use.device}`;
      if (!this.devices.has(key)) {
        this.devices.set(key, { service: use.service, rank: use.rank, device: use.device, times: [], busy: [], memory: [], total: 0 });
      }
      const kept = this.devices.get(key);
      kept.total = use.memory_total_bytes;
      use.times.forEach((time, place) => {
        const at = Date.parse(time);
        if (at <= (kept.times.at(-1) ?? 0)) return;
        kept.times.push(at);
        kept.busy.push(use.busy[place]);
        kept.memory.push(use.memory_bytes[place]);
      });
      const old = kept.times.findIndex((time) => time > kept.times.at(-1) - KEPT_MS);
      for (const values of [kept.times, kept.busy, kept.memory]) values.splice(0, Math.max(0, old));
    }
    this.draw();
  }

  rows() {
    return [...this.devices.values()].sort((a, b) =>
      a.service.localeCompare(b.service) || a.rank - b.rank || a.device.localeCompare(b.device));
  }

  draw() {
    const rows = this.rows();
    this.empty.hidden = rows.length > 0;
    this.box.hidden = rows.length === 0;
    const width = this.plot.clientWidth;
    if (rows.length === 0 || width === 0) return;
    const last = Math.max(...rows.map((device) => device.times.at(-1) ?? 0));
    // A run that is younger than the span still fills the width, from half a minute on.
    const first = Math.max(last - this.minutes * 60e3, Math.min(...rows.map((device) => device.times[0]), last - 30e3));
    const columns = Math.max(1, Math.floor(width / CELL));
    this.rowHeight = rows.length > MANY ? LOW_ROW : ROW;
    this.box.style.setProperty("--row", `${this.rowHeight}px`);
    this.cells = { rows, first, last, columns, values: rows.map((device) => this.binned(device, first, last, columns)) };
    const height = rows.length * this.rowHeight;
    const context = prepared(this.canvas, width, height + AXIS);
    this.cells.values.forEach((cells, row) => cells.forEach((value, column) => {
      if (Number.isNaN(value)) return;
      context.fillStyle = faded("heat", 0.06 + 0.94 * Math.min(1, Math.max(0, value)));
      context.fillRect((column * width) / columns, row * this.rowHeight + 1, width / columns, this.rowHeight - 2);
    }));
    this.drawAxis(context, width, height, first, last);
    this.names.replaceChildren(...rows.map((device) => el("div", {}, nameOf(device))));
    this.newest.replaceChildren(...rows.map((device) => el("div", { title: "now" }, percent(this.valueOf(device, device.times.length - 1)))));
    const told = rows.map((device) => `${nameOf(device)} ${percent(this.valueOf(device, device.times.length - 1))}`);
    this.plot.setAttribute("aria-label", `Devices over time, ${this.shows}; now: ${told.join("; ")}`);
  }

  valueOf(device, place) {
    return this.shows === "busy" ? device.busy[place] : device.memory[place] / device.total;
  }

  /** Means by column; NaN where there was no look. */
  binned(device, first, last, columns) {
    const sums = new Array(columns).fill(0);
    const counts = new Array(columns).fill(0);
    const columnOf = (time) => Math.min(columns - 1, Math.floor(((time - first) / (last - first || 1)) * columns));
    device.times.forEach((time, place) => {
      if (time < first) return;
      // A value is about the time since the look before.
      const before = device.times[place - 1];
      const from = before !== undefined && time - before < GAP_MS ? Math.max(0, columnOf(before) + 1) : columnOf(time);
      for (let column = Math.min(from, columnOf(time)); column <= columnOf(time); column += 1) {
        sums[column] += this.valueOf(device, place);
        counts[column] += 1;
      }
    });
    return sums.map((sum, column) => (counts[column] ? sum / counts[column] : NaN));
  }

  drawAxis(context, width, height, first, last) {
    context.font = canvasFont();
    context.fillStyle = colour("quiet");
    context.textAlign = "center";
    const apart = ((last - first) * 90) / width;
    const step = 1000 * (MARKS_S.find((seconds) => seconds * 1000 >= apart) ?? MARKS_S.at(-1));
    for (let time = Math.ceil(first / step) * step; time <= last; time += step) {
      const text = clock(new Date(time));
      const half = context.measureText(text).width / 2;
      const x = (width * (time - first)) / (last - first || 1);
      if (x >= half && x <= width - half) context.fillText(text, x, height + 14);
    }
  }

  point(event) {
    const box = this.plot.getBoundingClientRect();
    const column = Math.floor(((event.clientX - box.left) / box.width) * this.cells.columns);
    this.tell(Math.floor((event.clientY - box.top) / this.rowHeight), column, { x: event.clientX, y: event.clientY });
  }

  key(event) {
    const [row, column] = this.at ?? [0, this.cells.columns - 1];
    const moves = { ArrowLeft: [row, column - 1], ArrowRight: [row, column + 1], ArrowUp: [row - 1, column], ArrowDown: [row + 1, column] };
    if (!(event.key in moves)) return;
    event.preventDefault();
    const [r, c] = moves[event.key];
    const at = [Math.min(Math.max(r, 0), this.cells.rows.length - 1), Math.min(Math.max(c, 0), this.cells.columns - 1)];
    const box = this.plot.getBoundingClientRect();
    this.tell(...at, { x: box.left + (at[1] / this.cells.columns) * box.width, y: box.top + at[0] * this.rowHeight + this.rowHeight });
  }

  tell(row, column, anchor) {
    const device = this.cells.rows[row];
    if (device === undefined) return hideTip();
    this.at = [row, column];
    const { first, last, columns } = this.cells;
    const time = first + ((column + 0.5) / columns) * (last - first);
    const place = device.times.findLastIndex((seen) => seen <= time);
    const rows = [["time", clock(new Date(time))]];
    if (place >= 0) {
      rows.push(["busy", percent(device.busy[place])],
        ["memory", `${bytes(device.memory[place])} of ${bytes(device.total)}`]);
    }
    return showTip(anchor, nameOf(device), rows);
  }
}

function nameOf(device) {
  return `${device.service} ${device.rank} \u00b7 ${device.device}`;
}
