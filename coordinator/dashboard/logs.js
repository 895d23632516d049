// The tail of a log, which follows it.

import { ApiError, api } from "./api.js";
import { byId, el, select, setText } from "./dom.js";

const KEPT_CHARACTERS = 400000;
const FIRST_LOG = "coordinator";
const TAIL_BYTES = -65536;

export class Logs {
  constructor() {
    this.run = null;
    this.body = byId("logs-body");
    this.names = select("Log", [], (log) => this.open(log));
    this.filter = el("input", { type: "search", placeholder: "filter lines", "aria-label": "Filter lines", oninput: () => this.render() });
    this.follow = el("input", { type: "checkbox", checked: true });
    byId("logs-tools").append(this.names, this.filter, el("label", {}, this.follow, " follow"));
    this.setRun(null);
  }

  setRun(run) {
    this.run = run;
    this.names.replaceChildren();
    return this.open(FIRST_LOG);
  }

  async open(log) {
    [this.log, this.text, this.offset, this.isMissing] = [log, "", TAIL_BYTES, false];
    this.render();
    if (this.run !== null) await this.refresh();
  }

  /** Reads what was written since; one read at a time. */
  async refresh() {
    if (this.run === null || this.isReading || this.isMissing) return;
    const { run, log, offset } = this;
    this.isReading = true;
    try {
      const piece = await api.log(run, log, offset);
      if (run !== this.run || log !== this.log || offset !== this.offset) return;
      this.fillNames(piece.logs);
      this.offset = piece.next_offset;
      if (piece.text) {
        this.text = (this.text + piece.text).slice(-KEPT_CHARACTERS);
        this.render();
      } else if (this.text === "") this.render();
    } catch (error) {
      if (run !== this.run || log !== this.log) return;
      // Some runs, e.g. of other hosts, have no logs here: the panel says so.
      if (!(error instanceof ApiError) || error.status !== 404) throw error;
      this.isMissing = true;
      setText(this.body, error.message);
    } finally {
      this.isReading = false;
      if (run !== this.run || log !== this.log) this.refresh();
    }
  }

  fillNames(logs) {
    const had = [...this.names.options].map((option) => option.value);
    if (had.join("\n") === logs.join("\n")) return;
    this.names.replaceChildren(...logs.map((log) => el("option", { value: log }, log)));
    this.names.value = this.log;
  }

  render() {
    const wanted = this.filter.value.toLowerCase();
    const lines = wanted ? this.text.split("\n").filter((line) => line.toLowerCase().includes(wanted)).join("\n") : this.text;
    setText(this.body, lines || (this.text ? "No line has that in it." : "Nothing is written yet."));
    if (this.follow.checked) this.body.scrollTop = this.body.scrollHeight;
  }
}
