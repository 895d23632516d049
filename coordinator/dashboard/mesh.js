// The mesh: its services, their devices and weights, and what each does.

import { byId, el, emptyState, keyed, setText, table } from "./dom.js";
import { bytes, count, counted, percent } from "./format.js";

const NAMED_RANKS = 4;
const COLUMNS = ["Pool", "Ranks", "Version", "Does", "Lease"];

export class Mesh {
  constructor() {
    this.services = [];
    this.endpoints = {};
    this.places = new Map();
    this.versions = new Map();
    this.devicesOf = () => [];
    this.empty = emptyState("No service holds a lease.", "Services of a run appear while it goes on.");
    this.body = el("tbody");
    this.box = el("div", { class: "scroll mesh-table" }, table(["Role", ...COLUMNS].map((head) => [head]), this.body));
    byId("mesh-body").append(this.empty, this.box);
    this.render();
  }

  clear() {
    this.places.clear();
    this.versions.clear();
    this.render();
  }

  setServices(services) {
    this.services = services;
    this.render();
  }

  /** Where programs ask the policy, by service. */
  setEndpoints(endpoints) {
    this.endpoints = endpoints;
    this.render();
  }

  /** What a graph tells of services: their pools, and the weights that they made. */
  learn(graph) {
    for (const node of graph.nodes) {
      const role = roleOf(node.service);
      if (!this.places.has(role)) this.places.set(role, new Map());
      this.places.get(role).set(node.service, node.pool);
    }
    this.learnVersions(graph);
  }

  learnVersions(graph) {
    for (const node of graph?.nodes ?? []) {
      if (typeof node.policy_version === "number") this.versions.set(roleOf(node.service), node.policy_version);
    }
    this.render();
  }

  /** The newest version that completions were sampled with: what rollout holds. */
  setSampledVersion(version) {
    if (version !== undefined) this.versions.set("rollout", version);
  }

  render() {
    const rows = this.services.map((service) => this.rowOf(service));
    this.empty.hidden = rows.length > 0;
    this.box.hidden = rows.length === 0;
    setText(byId("mesh-count"), rows.length ? counted(rows.length, "service") : "");
    keyed(this.body, rows, (row) => row.key, makeRow, fillRow);
  }

  rowOf(service) {
    const { name } = service;
    const pools = this.places.get(service.role);
    return {
      key: `${service.role} ${service.address}`,
      name,
      address: service.address,
      endpoint: this.endpoints[name] ?? "",
      pid: service.pid,
      pool: pools?.get(name) ?? [...new Set(pools?.values() ?? [])].join(", "),
      devices: this.devicesOf(name),
      version: this.versions.get(service.role),
      status: service.status,
      left: (Date.parse(service.lease_until) - Date.now()) / 1000,
    };
  }
}

function roleOf(service) {
  return service.split("-")[0];
}

function leaseOf(left) {
  return left < 120 ? `${Math.ceil(left)} s` : `${Math.round(left / 60)} min`;
}

function makeRow() {
  return el("tr", {}, el("th", { scope: "row" }, el("span"), el("small", { class: "quiet" }), el("small", { class: "quiet endpoint" })),
    ...COLUMNS.map((label) => el("td", { "data-label": label })));
}

function fillRow(line, row) {
  const [head, pool, ranks, version, does, lease] = line.children;
  setText(head.firstChild, row.name);
  setText(head.children[1], row.address);
  setText(head.lastChild, row.endpoint && `answers at ${row.endpoint}`);
  head.title = row.pid ? `process ${row.pid}` : "";
  setText(pool, row.pool || "\u2013");
  // Many ranks are shown as small squares; the devices panel has their names.
  ranks.className = row.devices.length > NAMED_RANKS ? "many" : "";
  keyed(ranks, row.devices, (device) => `${device.rank} ${device.device}`, () => {
    const meter = el("i", { class: "meter" }, el("i"));
    return el("span", { class: "rank" }, el("span"), meter);
  }, (chip, device) => {
    setText(chip.firstChild, `${device.rank} ${device.device}`);
    chip.lastChild.firstChild.style.width = `${Math.round(100 * (device.busy ?? 0))}%`;
    chip.title = `rank ${device.rank} on ${device.device}: busy ${percent(device.busy)}, memory ${bytes(device.memory)} of ${bytes(device.total)}`;
  });
  setText(version, count(row.version));
  setText(does, row.status || "\u2013");
  const isHeld = row.left > 0;
  setText(lease, isHeld ? leaseOf(row.left) : "lost");
  lease.className = isHeld ? "lease held" : "lease lost";
  lease.title = isHeld ? "healthy: the lease holds for that long unless it is renewed" : "the lease was not renewed";
}
