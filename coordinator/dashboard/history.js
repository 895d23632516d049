// Metrics of a run in columns: one row a step, NaN where a step has none.

export class History {
  constructor() {
    this.steps = [];
    this.columns = new Map();
  }

  get names() {
    return [...this.columns.keys()];
  }

  /** The values of a metric, one a step; undefined when no step has it. */
  values(name) {
    return this.columns.get(name);
  }

  /** The newest number of a metric; undefined when there is none. */
  newest(name) {
    const values = this.columns.get(name);
    return values === undefined ? undefined : values.findLast((value) => !Number.isNaN(value));
  }

  /** Takes an answer of GET .../metrics. */
  merge({ steps, series }) {
    if (this.steps.length === 0) {
      this.steps = [...steps];
      for (const [name, values] of Object.entries(series)) {
        this.columns.set(name, values.map((value) => value ?? NaN));
      }
      return;
    }
    steps.forEach((step, row) => {
      const record = {};
      for (const [name, values] of Object.entries(series)) {
        if (values[row] !== null) record[name] = values[row];
      }
      this.add(step, record);
    });
  }

  /** Takes the metrics of one step; a step that is known gets what it had not. */
  add(step, metrics) {
    let row = this.steps.length;
    while (row > 0 && this.steps[row - 1] >= step) row -= 1;
    if (this.steps[row] !== step) {
      this.steps.splice(row, 0, step);
      for (const values of this.columns.values()) values.splice(row, 0, NaN);
    }
    for (const [name, value] of Object.entries(metrics)) {
      if (name === "step" || value === null) continue;
      let values = this.columns.get(name);
      if (values === undefined) {
        values = new Array(this.steps.length).fill(NaN);
        this.columns.set(name, values);
      }
      values[row] = value;
    }
  }

  /** Forgets a step and those after it: the run went back to before it, and makes them again. */
  dropFrom(step) {
    const row = this.steps.findIndex((known) => known >= step);
    if (row < 0) return;
    for (const values of [this.steps, ...this.columns.values()]) values.length = row;
  }

  /** Seconds of steps until the end of each, by "time/step"; of steps that were thinned out, by
   * their neighbour's. */
  elapsed() {
    const seconds = this.columns.get("time/step") ?? [];
    let total = 0;
    return this.steps.map((step, row) => {
      const steps = step - (row > 0 ? this.steps[row - 1] : 0);
      total += (Number.isFinite(seconds[row]) ? seconds[row] : 0) * steps;
      return total;
    });
  }
}
