// Alerts with their remedies, on top of the page.

import { byId, el, keyed, setText } from "./dom.js";

const NAMES = { critical: "Critical", warning: "Warning", info: "Note" };

export function showAlerts(alerts) {
  keyed(byId("alerts"), alerts, (alert) => `${alert.rule} ${alert.text}`,
    () => el("div", {}, el("strong", { class: "level" }), el("p", {}, el("span"), el("span", { class: "remedy" })), el("code")),
    (box, alert) => {
      box.className = `alert ${alert.level}`;
      const [level, said, rule] = box.children;
      setText(level, NAMES[alert.level]);
      setText(said.firstChild, `${alert.text} `);
      setText(said.lastChild, alert.remedy);
      setText(rule, alert.rule);
    });
}
