// The head of the page: the run, its progress, its buttons, and the state of the connection.

import { api, may } from "./api.js";
import { byId, el, setText } from "./dom.js";
import { confirmed } from "./dialogs.js";
import { count, seconds } from "./format.js";
import { isFinal } from "./live.js";

const MOST_COMPARED = 7; // The number of line colours, less the one of the chosen run.

export class Header {
  /** onRun(id): another run is chosen. onCompare(ids): those beside it. onError(error). */
  constructor({ onRun, onCompare, onChanged, onError }) {
    this.run = null;
    this.failure = "";
    this.recovery = null;
    this.compared = [];
    this.onCompare = onCompare;
    this.status = { name: "connecting" };
    const act = (button, what) => byId(button).addEventListener("click", () => {
      what().then(onChanged).catch(onError);
    });
    byId("run").addEventListener("change", (event) => onRun(event.target.value));
    act("pause", () => this.togglePause());
    act("checkpoint", () => api.checkpoint(this.run.run_id, crypto.randomUUID()));
    act("stop", () => this.stop());
    setInterval(() => {
      this.renderStatus();
      this.renderRecovery();
    }, 1000);
    closeWhenLeft(byId("compare"));
  }

  async togglePause() {
    const { run_id: id, state, step } = this.run;
    if (["paused", "pausing"].includes(state)) return api.resume(id);
    if (!isFinal(state)) return api.pause(id);
    if (state === "succeeded") return null;
    const question = `Start run ${id} again? It goes on after step ${count(step)}.`;
    return (await confirmed(question, "Start it again", "Leave it")) ? api.resume(id) : null;
  }

  async stop() {
    const id = this.run.run_id;
    const isWanted = await confirmed(`Stop run ${id}? It ends after the step in progress, with everything saved.`, "Stop the run", "Keep it going");
    return isWanted ? api.stop(id) : null;
  }

  setRuns(runs, chosen) {
    const select = byId("run");
    const shown = runs.map((run) => `${run.run_id} ${run.state}`).join("\n");
    if (shown !== this.shownRuns) {
      this.shownRuns = shown;
      select.replaceChildren(...runs.map((run) => el("option", { value: run.run_id }, `${run.run_id} (${run.state})`)));
      this.renderCompare(runs, chosen);
    }
    if (chosen !== null) select.value = chosen;
  }

  renderCompare(runs, chosen) {
    byId("compare").hidden = runs.length < 2;
    byId("compare-runs").replaceChildren(...runs.filter((run) => run.run_id !== chosen).map((run) => {
      const box = el("input", {
        type: "checkbox", value: run.run_id, checked: this.compared.includes(run.run_id),
        onchange: () => this.toggleCompared(run.run_id, box.checked),
      });
      return el("label", {}, box, ` ${run.run_id}`, el("span", { class: "quiet" }, ` ${run.state}, ${count(run.step)} steps`));
    }));
  }

  toggleCompared(id, isOn) {
    this.compared = this.compared.filter((other) => other !== id);
    if (isOn) this.compared = [...this.compared, id].slice(-MOST_COMPARED);
    for (const box of byId("compare-runs").querySelectorAll("input")) box.checked = this.compared.includes(box.value);
    this.onCompare(this.compared);
  }

  /** Another run: its comparison begins anew. */
  choose(runs, chosen, compared) {
    this.compared = compared;
    this.shownRuns = "";
    this.failure = "";
    this.setRuns(runs, chosen);
  }

  show(run) {
    this.run = run;
    const state = byId("state");
    setText(state, run.state);
    state.dataset.state = run.state;
    setText(byId("progress-text"), `step ${count(run.step)} of ${count(run.num_steps)}`);
    setText(byId("activity"), [run.algorithm, run.activity].filter(Boolean).join(" \u00b7 "));
    const progress = byId("progress");
    progress.max = Math.max(1, run.num_steps);
    progress.value = run.step;
    const hasEnded = isFinal(run.state);
    const isHeld = ["paused", "pausing"].includes(run.state);
    for (const id of ["checkpoint", "stop"]) byId(id).hidden = hasEnded;
    byId("pause").hidden = run.state === "succeeded";
    setText(byId("pause"), isHeld || hasEnded ? "Resume" : "Pause");
    allow("stop", "drive", run.state !== "stopping");
    allow("checkpoint", "drive");
    allow("pause", hasEnded ? "admin" : "drive");
    const isRecovering = run.state === "recovering";
    document.title = `${isRecovering ? "recovering " : ""}${run.step}/${run.num_steps} ${run.run_id} \u00b7 rolemesh`;
    const recovered = run.recoveries - (isRecovering ? 1 : 0);
    byId("recoveries").hidden = recovered < 1;
    setText(byId("recoveries"), `recovered ${recovered === 1 ? "once" : `${count(recovered)} times`}`);
    this.renderRecovery();
    if (run.failure === this.failure) return;
    // It is gone again where the run was resumed.
    this.failure = run.failure;
    this.tell(run.failure ? `The run failed: ${run.failure}` : "");
  }

  /** recovery: {since, cause} while the run recovers, by its events; else null. */
  setRecovery(recovery) {
    this.recovery = recovery;
    this.renderRecovery();
  }

  renderRecovery() {
    const isRecovering = this.run?.state === "recovering";
    byId("recovering").hidden = !isRecovering;
    if (!isRecovering) return;
    const { since, cause } = this.recovery ?? { since: Date.parse(this.run.updated_at), cause: this.run.activity };
    setText(byId("recovering-for"), `for ${seconds(Math.max(0, Math.round((Date.now() - since) / 1000)))}`);
    setText(byId("recovering-from"), `from: ${cause.replace(/^recovering: /, "")}`);
  }

  setStatus(status) {
    this.status = status;
    this.renderStatus();
  }

  renderStatus() {
    const live = byId("live");
    live.dataset.status = this.status.name;
    // Without the countdown of seconds, which a screen reader would read one by one.
    setText(byId("live-said"), this.status.name);
    if (this.status.name === "disconnected") {
      const left = Math.max(0, Math.ceil((this.status.retryAt - Date.now()) / 1000));
      setText(live, left > 0 ? `disconnected, again in ${left} s` : "disconnected, trying again");
      live.title = this.status.problem;
    } else {
      setText(live, this.status.name === "gone" ? "ended, coordinator gone" : this.status.name);
      live.title = this.status.problem ?? { live: "Events arrive as they happen.", ended: "The run has ended." }[this.status.name] ?? "";
    }
  }

  /** A line under the head; empty takes it away. */
  tell(text) {
    const line = byId("failure");
    line.hidden = text === "";
    setText(line, text);
  }
}

/** A menu closes when the operator turns to something else, and by Escape. */
function closeWhenLeft(menu) {
  document.addEventListener("click", (event) => {
    if (!menu.contains(event.target)) menu.open = false;
  });
  menu.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    menu.open = false;
    menu.querySelector("summary").focus();
  });
}

/** A button works where it makes sense and the token allows what it does. */
function allow(id, scope, makesSense = true) {
  const isAllowed = may(scope);
  byId(id).disabled = !isAllowed || !makesSense;
  byId(id).title = isAllowed ? "" : `Needs a token of the scope ${scope}.`;
}
