// Connects panels, coordinator and operator; holds the chosen run and step.

import { showAlerts } from "./alerts.js";
import { ApiError, api, onTokenWanted } from "./api.js";
import { Curves } from "./curves.js";
import { WANTED } from "./curve_list.js";
import { Devices } from "./devices.js";
import { askForToken } from "./dialogs.js";
import { byId } from "./dom.js";
import { Events } from "./events.js";
import { Experts } from "./experts.js";
import { Flow } from "./flow.js";
import { Header } from "./header.js";
import { History } from "./history.js";
import { startKeys } from "./keys.js";
import { Watch, isFinal } from "./live.js";
import { Logs } from "./logs.js";
import { Mesh } from "./mesh.js";
import { showNumbers } from "./numbers.js";
import { Plan } from "./plan.js";
import { Recoveries } from "./recoveries.js";
import { Rewards } from "./rewards.js";
import { Samples } from "./samples.js";
import { nextTheme, startTheme } from "./theme.js";

const FLOW_DELAY_MS = 3000; // The first graph of a run is written a second after its step begins.
const EXPERTS_METRIC = "experts/load_ratio"; // Of each step that trains a mixture.
const EVERY_MS = { flow: 1000, run: 2000, logs: 2000, services: 3000, devices: 5000, runs: 10000, alerts: 10000 };

const page = {
  runs: [], run: null, chosen: null, history: new History(), compared: new Map(),
  step: 0, sampleStep: 0, expertStep: 0, toldStep: 0, firstStepSince: Infinity, watch: null, status: { name: "connecting" }, wantsAll: false, soon: new Set(),
};

startTheme(byId("theme"));
onTokenWanted(askForToken);
const header = new Header({
  onRun: (id) => choose(id).catch(showError), onCompare: (ids) => compare(ids).catch(showError),
  onChanged: (run) => run && show(run), onError: showError,
});
const flow = new Flow({ onStep: (step) => { page.step = step; attempt(refreshFlow); } });
const mesh = new Mesh();
const plan = new Plan();
const devices = new Devices();
const curves = new Curves({ onChooseStep: showStep, onWantAll: wantAll });
const samples = new Samples({ onStep: (step) => { page.sampleStep = step; attempt(refreshSamples); } });
const experts = new Experts({ onStep: (step) => { page.expertStep = step; attempt(refreshExperts); } });
const rewards = new Rewards();
const events = new Events();
const recoveries = new Recoveries();
const logs = new Logs();
mesh.devicesOf = (service) => devices.of(service);
startKeys({
  p: ["pause or resume", () => byId("pause").click()],
  c: ["save a checkpoint", () => byId("checkpoint").click()],
  s: ["stop the run (asks again)", () => byId("stop").click()],
  r: ["choose a run", () => byId("run").focus()],
  "[": ["step before", () => flow.move(-1)],
  "]": ["step after", () => flow.move(1)],
  f: ["follow the run", () => showStep(0)],
  t: ["theme: as the system, light, dark", () => nextTheme(byId("theme"))],
});

function showError(error) {
  header.tell(error.message);
  setTimeout(() => header.tell(page.run?.failure ?? ""), 10000);
}

/** Reads without a fuss: while the coordinator is away, the head says so already. */
async function attempt(read) {
  const run = page.chosen;
  try {
    await read();
    if (["unreachable", "gone"].includes(header.status.name)) header.setStatus(page.status);
  } catch (error) {
    const isAway = error instanceof TypeError || (error instanceof ApiError && error.status === 503);
    if (run !== page.chosen) return;
    if (!isAway) showError(error);
    // The coordinator of a single run ends with the run. This is not an error.
    else if (page.status.name === "ended") header.setStatus({ name: "gone", problem: error.message });
    else if (header.status.name !== "disconnected") header.setStatus({ name: "unreachable", problem: error.message });
  }
}

/** Gives what was read to `take`, unless another run was chosen meanwhile. */
async function reading(read, take) {
  const run = page.chosen;
  if (run === null) return;
  const answer = await read(run);
  if (run === page.chosen) take(answer);
}

const refreshRun = () => reading(api.run, show);
const refreshServices = () => reading(async (run) => (await api.services()).services.filter((one) => one.run_id === run),
  (services) => mesh.setServices(services));
const refreshAlerts = () => reading(api.alerts, (answer) => showAlerts(answer.alerts));
const refreshDevices = () => reading((run) => api.devices(run, devices.since), (answer) => {
  devices.add(answer);
  mesh.render();
});
const refreshPlan = () => reading(api.plan, (answer) => plan.show(answer.plan));
const refreshSamples = () => reading((run) => orNone(api.samples(run, page.sampleStep)),
  (answer) => samples.show(answer, page.sampleStep === 0));
async function refreshExperts() {
  const step = page.expertStep;
  if (!experts.isKept(step)) return experts.show(null, step);
  return reading((run) => orNone(api.experts(run, step)), (answer) => step === page.expertStep && experts.show(answer, step));
}

const refreshMetrics = () => reading((run) => api.metrics(run, page.wantsAll ? [] : WANTED), (answer) => {
  page.history.merge(answer);
  showHistory();
});

async function refreshFlow() {
  if (!hasGraph()) return;
  const step = page.step;
  await reading((run) => orNone(api.dataflow(run, step)), (graph) => {
    if (step !== page.step) return;
    flow.show(graph, step === 0, step > 0 ? `The graph of step ${step} is not kept.` : "");
    if (graph === null) return;
    mesh.learn(graph);
    // A step in progress has no version of weights yet; the step before has one.
    if (page.knowsVersions || graph.is_made || graph.step < 2) return;
    page.knowsVersions = true;
    attempt(() => learnVersions(graph.step - 1));
  });
}

const learnVersions = (step) => reading((run) => orNone(api.dataflow(run, step)), (graph) => mesh.learnVersions(graph));

/** null where there is no such step, which panels show as such. */
async function orNone(answer) {
  try {
    return await answer;
  } catch (error) {
    if (error instanceof ApiError && error.reason === "STEP_NOT_FOUND") return null;
    throw error;
  }
}

async function refreshRuns() {
  page.runs = (await api.runs()).runs;
  byId("empty").hidden = page.runs.length > 0;
  header.setRuns(page.runs, page.chosen);
  const listed = page.runs.find((run) => run.run_id === page.chosen);
  if (listed && page.run && isFinal(page.run.state) && !isFinal(listed.state)) show(listed);
  if (page.chosen === null && page.runs.length > 0) {
    const asked = new URLSearchParams(location.search);
    const known = (id) => page.runs.some((run) => run.run_id === id);
    await choose(known(asked.get("run")) ? asked.get("run") : page.runs[0].run_id, asked.getAll("compare").filter(known));
  }
}

async function choose(id, comparedIds = []) {
  page.watch?.stop();
  Object.assign(page, { chosen: id, run: null, watch: null, status: { name: "connecting" }, history: new History(), compared: new Map(), step: 0, sampleStep: 0, expertStep: 0, toldStep: 0, firstStepSince: Infinity, knowsVersions: false });
  for (const panel of [mesh, plan, devices, experts, events, recoveries]) panel.clear();
  header.setRecovery(null);
  header.tell("");
  header.choose(page.runs, id, comparedIds);
  const first = page.runs.find((run) => run.run_id === id);
  if (first) show(first);
  // A read that fails is repeated later, and must not keep the page from watching the run.
  await Promise.all([
    refreshMetrics, refreshFlow, refreshServices, refreshPlan, refreshDevices, refreshSamples, refreshExperts, refreshAlerts,
    () => logs.setRun(id), () => compare(comparedIds),
  ].map(attempt));
  if (page.chosen !== id) return;
  // After two frames: the first one draws the changes of this call.
  requestAnimationFrame(() => requestAnimationFrame(() => performance.mark("rolemesh:drawn", { detail: id })));
  watch();
}

/** Hears of everything that happens after an event; what is drawn already is passed over. */
function watch(after = "") {
  page.watch = new Watch(page.chosen, after, {
    onEvent, onStatus,
    // The page was away for longer than events are kept. The metrics have the missed steps.
    onExpired: () => {
      page.toldStep = 0;
      for (const panel of [events, recoveries]) panel.clear();
      attempt(refreshMetrics);
      watch();
    },
  });
}

function onStatus(status) {
  const isBack = status.name === "live" && header.status.name !== "connecting";
  page.status = status;
  header.setStatus(status);
  if (isBack) for (const read of [refreshRun, refreshServices, refreshDevices, refreshAlerts]) attempt(read);
}

function onEvent(event) {
  events.add(event);
  const { kind, event: told } = event;
  if (recoveries.add(event)) soon(showHistory);
  if (kind === "state") {
    header.setRecovery(recoveries.now);
    for (const read of [refreshRun, refreshServices, refreshDevices]) soon(read);
  }
  // The newest step of a process that was killed may have a record and no event.
  if (kind === "resumed") for (const read of [refreshMetrics, refreshPlan]) soon(read);
  // Steps that the run went back before are gone until they are made again.
  if (kind === "recovered" && told.recovered.lost_steps > 0) {
    const newest = page.history.steps.at(-1) ?? 0;
    if (newest <= told.recovered.step + told.recovered.lost_steps) page.history.dropFrom(told.step + 1);
    page.toldStep = Math.min(page.toldStep, told.step);
  }
  if (kind !== "step_made" && kind !== "evaluated") return;
  if (kind === "step_made") {
    if (told.step <= page.toldStep) page.history.dropFrom(told.step);
    page.toldStep = told.step;
  }
  // Events from before the page was opened are drawn already.
  if (told.step < (page.history.steps.at(-1) ?? 0)) return;
  page.history.add(told.step, told[kind].metrics);
  soon(showHistory);
  for (const read of [refreshRun, refreshAlerts, refreshSamples, refreshFlow]) soon(read);
  if (plan.isPlanned) soon(refreshPlan);
  if (experts.isShown || EXPERTS_METRIC in told[kind].metrics) soon(refreshExperts);
}

/** Does something within a tenth of a second, once for all events that come until then. */
function soon(read) {
  if (page.soon.has(read)) return;
  page.soon.add(read);
  setTimeout(() => {
    page.soon.delete(read);
    attempt(read);
  }, 100);
}

function show(run) {
  page.run = run;
  if (run.activity.startsWith("step ")) page.firstStepSince = Math.min(page.firstStepSince, Date.now());
  header.show(run);
  mesh.setEndpoints(run.endpoints);
  // It was resumed after its end.
  if (!isFinal(run.state) && page.status.name === "ended" && page.watch) watch(page.watch.after);
}

function showHistory() {
  showNumbers(page.history);
  flow.usualSeconds = page.history.newest("time/step") ?? 0;
  mesh.setSampledVersion(page.history.newest("policy_version/max"));
  rewards.render(page.history);
  curves.setRuns([{ id: page.chosen, history: page.history }, ...[...page.compared].map(([id, history]) => ({ id, history }))], recoveries.marks);
}

async function compare(ids) {
  const compared = new Map();
  await Promise.all(ids.map(async (id) => {
    const history = page.compared.get(id) ?? new History();
    if (!page.compared.has(id)) history.merge(await api.metrics(id, page.wantsAll ? [] : WANTED));
    compared.set(id, history);
  }));
  page.compared = new Map(ids.map((id) => [id, compared.get(id)]));
  const query = new URLSearchParams([["run", page.chosen], ...ids.map((id) => ["compare", id])]);
  window.history.replaceState(null, "", `?${query}${location.hash}`);
  showHistory();
}

async function wantAll() {
  if (page.wantsAll) return;
  page.wantsAll = true;
  await attempt(refreshMetrics);
}

/** Shows a step in all panels that show one; 0 follows the run. */
function showStep(step) {
  [page.step, page.sampleStep, page.expertStep] = [step, step, step];
  for (const read of [refreshFlow, refreshSamples]) attempt(read);
  if (experts.isShown) attempt(refreshExperts);
}

function every(ms, read, isWanted = () => true) {
  let isReading = false;
  setInterval(async () => {
    if (isReading || document.hidden || header.status.name === "disconnected" || !isWanted()) return;
    isReading = true;
    await attempt(read);
    isReading = false;
  }, ms);
}

const goesOn = () => page.run !== null && !isFinal(page.run.state);

/** Whether a graph can be there: to ask for one that is not leaves an error in the browser's log. */
function hasGraph() {
  if (page.run === null || page.run.algorithm === "external") return false;
  return page.run.step > 0 || Date.now() - page.firstStepSince > FLOW_DELAY_MS;
}

every(EVERY_MS.runs, refreshRuns);
every(EVERY_MS.run, refreshRun, goesOn);
every(EVERY_MS.flow, refreshFlow, () => goesOn() && page.step === 0);
every(EVERY_MS.services, refreshServices);
every(EVERY_MS.devices, refreshDevices, goesOn);
every(EVERY_MS.alerts, refreshAlerts, goesOn);
every(EVERY_MS.logs, () => logs.refresh(), goesOn);
attempt(refreshRuns);
