// The plan that a run began with, beside what its steps took: seconds by call, tokens, pools.

import { byId, el, scrolled, table } from "./dom.js";
import { count, counted, isNumber, percent, seconds } from "./format.js";

// Headings with the class of their column.
const CALL_HEADS = [["Call"], ["Pool"], ["Planned", "right"], ["Measured", "right"], ["Error", "right"], ["In the planned step", "planned-lane"]];
const POOL_HEADS = [["Pool"], ["Planned"], ["This run"]];

export class Plan {
  constructor() {
    this.clear();
  }

  clear() {
    this.show(null);
  }

  /** plan: that of an answer of GET .../plan; null where the run was not planned. */
  show(plan) {
    this.isPlanned = plan !== null;
    for (const id of ["plan", "plan-link"]) byId(id).hidden = !this.isPlanned;
    if (!this.isPlanned) return byId("plan-body").replaceChildren();
    byId("plan-body").replaceChildren(
      el("p", {}, `A step: planned ${seconds(plan.step_s)}, ${measuredOf(plan)}.`),
      el("p", { class: "quiet" }, `Planned for ${plan.rows}: ${count(plan.tokens)} tokens a step`,
        isNumber(plan.measured_tokens) ? `, measured ${count(plan.measured_tokens)}.` : "."),
      el("p", { class: "quiet" }, `Predicted: ${plan.basis}.`),
      scrolled("Planned calls", callTable(plan)),
      scrolled("Planned pools", poolTable(plan.pools)));
  }
}

function measuredOf(plan) {
  if (!isNumber(plan.measured_step_s)) return "measured after the third step";
  return `measured ${seconds(plan.measured_step_s)} (median of ${counted(plan.num_steps, "step")}), error ${errorOf(plan.step_s, plan.measured_step_s)}`;
}

/** Predicted / measured - 1, as text; what is less than a tenth of a percent has no sign. */
export function errorOf(predicted, measured) {
  if (!isNumber(predicted) || !isNumber(measured) || measured <= 0) return "\u2013";
  const error = Math.round(1000 * (predicted / measured - 1)) / 1000;
  return `${["\u2212", "", "+"][Math.sign(error) + 1]}${percent(Math.abs(error))}`;
}

function callTable(plan) {
  const length = Math.max(plan.step_s, ...plan.tasks.map((task) => (task.start_s ?? 0) + (task.predicted_s ?? 0)));
  const row = (name, pool, bar, planned, measured) => el("tr", {},
    el("th", { scope: "row" }, ...breakable(name)), el("td", {}, pool),
    ...[seconds(planned), seconds(measured), errorOf(planned, measured)].map((text) => el("td", { class: "right" }, text)),
    el("td", { class: "planned-lane" }, bar));
  const rows = plan.tasks.map((task) => row(
    task.is_ahead ? `${task.name} (for a later step)` : task.name,
    task.pool || (isNumber(task.predicted_s) ? "no device" : "not planned"),
    barOf(task, length), task.predicted_s, task.measured_s));
  return table(CALL_HEADS, el("tbody", {}, ...rows),
    el("tfoot", {}, row("step", "", null, plan.step_s, plan.measured_step_s)));
}

/** A name that a narrow column may break after a dot or an underscore. */
const breakable = (name) => name.split(/(?<=[._])/).flatMap((part) => [part, el("wbr")]);

/** When the call was to be at work, on the axis of the planned step. */
function barOf(task, length) {
  if (!isNumber(task.start_s)) return null;
  const bar = el("i", { title: `${seconds(task.start_s)} to ${seconds(task.start_s + task.predicted_s)}` });
  bar.style.left = `${(100 * task.start_s) / length}%`;
  bar.style.width = `${(100 * task.predicted_s) / length}%`;
  return bar;
}

function poolTable(pools) {
  return table(POOL_HEADS, el("tbody", {}, ...pools.map((pool) => el("tr", {},
    el("th", { scope: "row" }, pool.name),
    el("td", {}, told(pool.planned_devices, pool.planned_roles)),
    el("td", {}, told(named(pool.devices), pool.roles), isAsPlanned(pool) ? null : el("span", { class: "trouble" }, " differs"))))));
}

const told = (devices, roles) => (devices ? `${devices}: ${roles.join(", ")}` : "\u2013");

const named = (devices) => (devices.length < 3 ? devices.join(", ") : `${devices[0]} to ${devices.at(-1)}`);

/** Whether a run has a pool as it was planned. Ranks on a CPU share it: their number says nothing. */
export function isAsPlanned(pool) {
  const isCpu = (device) => device.endsWith("cpu");
  const isSameSize = isCpu(pool.planned_devices)
    ? pool.devices.every(isCpu) && pool.devices.length > 0
    : Number.parseInt(pool.planned_devices, 10) === pool.devices.length && !pool.devices.some(isCpu);
  return isSameSize && pool.roles.join() === pool.planned_roles.join();
}
