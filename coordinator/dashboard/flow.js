// A step as a timeline: a row a service, grouped by pool, the critical path filled.

import { byId, el, emptyState, keyed, scrolled, setText, table } from "./dom.js";
import { brief, bytes, count, percent, seconds } from "./format.js";
import { ticks } from "./series.js";
import { giveTip } from "./tip.js";

const KINDS = { sample: "sample", infer: "infer", update: "update", eval: "evaluate" };

export class Flow {
  /** onStep(step): shows that step; 0 follows the run. */
  constructor({ onStep }) {
    this.onStep = onStep;
    this.clock = { step: 0, known: 0, since: 0 };
    this.graph = null;
    this.usualSeconds = 0;
    this.following = el("button", { type: "button", "aria-pressed": "true", onclick: () => onStep(0) }, "Follow");
    this.stepInput = el("input", {
      type: "number", min: "1", class: "step-input", "aria-label": "Step",
      onchange: () => onStep(Math.max(1, Math.round(Number(this.stepInput.value)))),
    });
    byId("flow-tools").append(
      el("button", { type: "button", "aria-label": "Step before", title: "Step before ([)", onclick: () => this.move(-1) }, "\u2039"),
      el("label", {}, "step ", this.stepInput),
      el("button", { type: "button", "aria-label": "Step after", title: "Step after (])", onclick: () => this.move(1) }, "\u203a"),
      this.following);
    this.empty = emptyState("No step has begun yet.", "Its calls appear here as they are made.");
    this.summary = el("p", { class: "flow-summary" });
    this.path = el("ol", { class: "path", "aria-label": "Critical path" });
    this.rows = el("div", { class: "flow-rows", role: "group", "aria-label": "Calls of the step" });
    this.axis = el("div", { class: "flow-axis", "aria-hidden": "true" });
    this.callRows = el("tbody");
    this.table = el("details", { class: "more", ontoggle: () => this.renderTable() },
      el("summary", {}, "Calls as a table"),
      scrolled("Calls", table([["call"], ["pool"], ["state"], ["start"], ["time"], ["tokens"], ["bytes"]], this.callRows)));
    this.legend = el("p", { class: "flow-legend quiet" },
      ...Object.entries(KINDS).map(([kind, label]) => el("span", {}, el("i", { class: `swatch kind-${kind}` }), label)),
      el("span", {}, el("i", { class: "swatch critical" }), "critical path"),
      el("span", {}, el("i", { class: "swatch off-path" }), "off the path"),
      el("span", {}, el("i", { class: "swatch waits" }), "waits for its pool"));
    byId("flow-body").append(this.empty, this.summary, this.rows, this.axis, this.legend, this.path, this.table);
    this.show(null, true);
  }

  move(by) {
    if (this.graph !== null) this.onStep(Math.max(1, this.graph.step + by));
  }

  /** graph: an answer of GET .../dataflow, or null where there is none. */
  show(graph, isFollowing, missing = "") {
    this.graph = graph;
    this.following.setAttribute("aria-pressed", String(isFollowing));
    const isEmpty = graph === null || graph.nodes.length === 0;
    this.empty.hidden = !isEmpty;
    if (missing) setText(this.empty, missing);
    for (const part of [this.summary, this.rows, this.axis, this.legend, this.path, this.table]) part.hidden = isEmpty;
    if (isEmpty) return;
    if (document.activeElement !== this.stepInput) this.stepInput.value = graph.step;
    const now = this.timeOf(graph);
    // The axis of a step in progress is as long as a step usually is, so that bars stay in place.
    const end = graph.is_made ? now : Math.max(now, this.usualSeconds);
    this.renderSummary(graph, now);
    this.renderRows(graph.nodes, now, end);
    this.renderAxis(end);
    this.renderPath(graph.nodes);
    this.renderTable();
  }

  /** Seconds that the step took; of one in progress, so far. */
  timeOf(graph) {
    const times = graph.nodes.flatMap((node) => [node.ready_s, node.started_s, node.ended_s]).filter(isTime);
    const known = Math.max(0.001, ...times);
    if (graph.is_made) return known;
    if (this.clock.step !== graph.step || known > this.clock.known + 1e-6) {
      this.clock = { step: graph.step, known, since: performance.now() };
    }
    return known + (performance.now() - this.clock.since) / 1000;
  }

  renderSummary(graph, took) {
    const critical = graph.nodes.filter((node) => node.is_critical);
    const busy = covered(critical);
    const running = graph.nodes.filter((node) => node.state === "running").map((node) => node.name);
    const parts = graph.is_made
      ? [`Step ${count(graph.step)}: ${seconds(took)}`, `critical path ${seconds(busy)} (${percent(busy / took)})`]
      : [`Step ${count(graph.step)} in progress: ${seconds(took)} so far`,
        running.length ? `now ${running.join(", ")}` : "between calls"];
    setText(this.summary, parts.join("; "));
  }

  renderRows(nodes, now, end) {
    const pools = new Map();
    for (const node of nodes) {
      if (!pools.has(node.pool)) pools.set(node.pool, new Map());
      const services = pools.get(node.pool);
      if (!services.has(node.service)) services.set(node.service, []);
      services.get(node.service).push(node);
    }
    const makePool = () => el("div", { class: "flow-pool" }, el("h3"), el("div"));
    keyed(this.rows, [...pools], ([pool]) => pool, makePool, (part, [pool, services]) => {
      setText(part.firstChild, pool || "no pool");
      keyed(part.lastChild, [...services], ([service]) => service,
        () => el("div", { class: "flow-row" }, el("span", { class: "flow-name" }), el("div", { class: "lanes" })),
        (row, [service, calls]) => {
          setText(row.firstChild, service);
          this.renderBars(row.lastChild, calls, now, end);
        });
    });
  }

  renderBars(lanes, calls, now, end) {
    const taken = [];
    // A call that waits for its inputs has no place in time yet, but its row is shown already.
    const begun = calls.filter((node) => isTime(node.started_s) || isTime(node.ready_s));
    const placed = begun.sort((a, b) => startOf(a) - startOf(b)).map((node) => {
      const stop = isTime(node.started_s) ? node.ended_s ?? now : now;
      let lane = taken.findIndex((free) => free <= startOf(node) + 1e-6);
      if (lane < 0) lane = taken.length;
      taken[lane] = stop;
      return { node, lane, stop };
    });
    lanes.style.height = `${Math.max(1, taken.length) * 24}px`;
    keyed(lanes, placed.map((item, place) => ({ ...item, place })), (item) => `${item.node.name}#${item.place}`,
      (item) => {
        const bar = el("button", { type: "button", class: "call" }, el("span", { class: "wait" }), el("span", { class: "work" }, el("span")));
        bar.item = item;
        giveTip(bar, () => tipOf(bar.item.node));
        return bar;
      },
      (bar, item) => drawBar(bar, item, end));
  }

  renderAxis(end) {
    const marks = ticks(0, end, 6).filter((mark) => mark <= end);
    this.axis.replaceChildren(...marks.map((mark) => {
      const label = el("span", { class: mark > 0.95 * end ? "at-end" : null }, mark === 0 ? "0" : brief(seconds(mark)));
      label.style.left = `${(100 * mark) / end}%`;
      return label;
    }));
  }

  renderPath(nodes) {
    const critical = nodes.filter((node) => node.is_critical).sort((a, b) => startOf(a) - startOf(b));
    this.path.hidden = critical.length === 0;
    keyed(this.path, critical, (node) => `${node.name}@${node.started_s}`, () => el("li"),
      (item, node) => setText(item, `${node.name} ${seconds(secondsOf(node))}`));
  }

  renderTable() {
    if (!this.table.open || this.graph === null) return;
    this.callRows.replaceChildren(...this.graph.nodes.map((node) => el("tr", {},
      el("th", { scope: "row" }, node.name), el("td", {}, node.pool),
      el("td", {}, node.is_critical ? `${node.state}, critical` : node.state),
      el("td", {}, seconds(node.started_s)), el("td", {}, seconds(isTime(node.ended_s) ? secondsOf(node) : NaN)),
      el("td", {}, count(node.num_tokens)), el("td", {}, bytes(node.num_bytes)))));
  }
}

function isTime(value) {
  return typeof value === "number";
}

function startOf(node) {
  return node.ready_s ?? node.started_s ?? 0;
}

function secondsOf(node) {
  return isTime(node.started_s) && isTime(node.ended_s) ? node.ended_s - node.started_s : 0;
}

/** Seconds that calls cover: the path may read a block of a call that still runs. */
function covered(nodes) {
  let [sum, at] = [0, 0];
  for (const node of nodes.filter((one) => isTime(one.ended_s)).sort((a, b) => a.started_s - b.started_s)) {
    sum += Math.max(0, node.ended_s - Math.max(at, node.started_s));
    at = Math.max(at, node.ended_s);
  }
  return sum;
}

function drawBar(bar, item, end) {
  bar.item = item;
  const { node, lane, stop } = item;
  const begin = startOf(node);
  const started = isTime(node.started_s) ? node.started_s : stop;
  const width = Math.max(stop - begin, end * 0.002);
  bar.className = `call kind-${node.kind} state-${node.state}${node.is_critical ? " critical" : ""}`;
  bar.style.left = `${(100 * begin) / end}%`;
  bar.style.width = `${(100 * width) / end}%`;
  bar.style.top = `${lane * 24 + 2}px`;
  const [wait, work] = bar.children;
  wait.style.width = `${(100 * (started - begin)) / width}%`;
  setText(work.firstChild, node.name.slice(node.name.indexOf(".") + 1).replaceAll("_", " "));
  const [title, rows] = tipOf(node);
  bar.setAttribute("aria-label", `${title}: ${rows.map((row) => row.join(" ")).join(", ")}`);
}

function tipOf(node) {
  const rows = [["state", node.is_critical ? `${node.state}, on the critical path` : node.state], ["pool", node.pool]];
  if (isTime(node.started_s)) rows.push(["start", seconds(node.started_s)]);
  if (isTime(node.ended_s)) rows.push(["time", seconds(secondsOf(node))]);
  if (isTime(node.started_s) && isTime(node.ready_s)) rows.push(["waited", seconds(Math.max(0, node.started_s - node.ready_s))]);
  if (node.num_tokens) rows.push(["tokens", count(node.num_tokens)]);
  if (node.num_tokens && secondsOf(node)) rows.push(["tokens a second", count(node.num_tokens / secondsOf(node))]);
  for (const [way, size] of Object.entries(node.pulled_bytes ?? {})) rows.push([`pulled, ${way.replace("_", " x ")}`, bytes(size)]);
  for (const [phase, spent] of Object.entries(node.phases ?? {})) rows.push([phase.replaceAll("_", " "), seconds(spent)]);
  if (isTime(node.policy_version)) rows.push(["version", count(node.policy_version)]);
  if (node.after?.length) rows.push(["needs", node.after.join(", ")]);
  return [node.name, rows];
}
