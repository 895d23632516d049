// The REST of a coordinator: requests, and the events of a run as they happen.

const TOKEN_KEY = "rolemesh.token";
const base = new URL("api/v1/", document.baseURI);
const SILENCE_MS = 45000; // Three heartbeats: a connection that is silent for longer is dead.
const NEWEST_RUNS = 50;
const SCOPES = ["read", "drive", "admin"];
let askForToken = null;
let asking = null;
let scope = "admin";

takeToken();

/** An answer that is no success: problem details of RFC 9457. */
export class ApiError extends Error {
  constructor(status, problem) {
    super(problem.detail || problem.title || `HTTP status ${status}`);
    this.status = status;
    this.reason = problem.reason ?? "";
  }
}

/** Takes the token out of the address that the coordinator has printed. A browser sends what
 * stands behind # to no server; the history of the browser has not to keep it either. */
function takeToken() {
  const hidden = new URLSearchParams(location.hash.slice(1));
  const token = hidden.get("token");
  if (token === null) return;
  sessionStorage.setItem(TOKEN_KEY, token);
  hidden.delete("token");
  const rest = hidden.size ? `#${hidden}` : "";
  history.replaceState(null, "", `${location.pathname}${location.search}${rest}`);
}

/** Whether the token that is in use allows what needs a scope. */
export const may = (wanted) => SCOPES.indexOf(scope) >= SCOPES.indexOf(wanted);

/** Gives what asks the operator for a token: () => Promise<string>. */
export function onTokenWanted(ask) {
  askForToken = ask;
}

async function response(path, options = {}) {
  const token = sessionStorage.getItem(TOKEN_KEY);
  const headers = { ...options.headers };
  if (token) headers.authorization = `Bearer ${token}`;
  const answer = await fetch(new URL(path, base), { ...options, headers, cache: "no-store" });
  if (answer.status === 401 && askForToken !== null) {
    // Many requests are refused at once; the operator is asked once.
    asking ??= askForToken().then((given) => sessionStorage.setItem(TOKEN_KEY, given))
      .finally(() => { asking = null; });
    await asking;
    return response(path, options);
  }
  scope = answer.headers.get("x-rolemesh-scope") ?? scope;
  if (!answer.ok) throw new ApiError(answer.status, await problemOf(answer));
  return answer;
}

async function problemOf(answer) {
  const isJson = (answer.headers.get("content-type") ?? "").includes("json");
  return isJson ? answer.json() : { detail: await answer.text() };
}

async function get(path, query = {}, signal = undefined) {
  const asked = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    for (const one of Array.isArray(value) ? value : [value]) asked.append(name, one);
  }
  const answer = await response(`${path}${asked.size ? `?${asked}` : ""}`, { signal });
  return answer.json();
}

async function post(path, body = undefined) {
  const headers = body === undefined ? {} : { "content-type": "application/json" };
  const sent = body === undefined ? undefined : JSON.stringify(body);
  return (await response(path, { method: "POST", headers, body: sent })).json();
}

const of = (run) => `runs/${encodeURIComponent(run)}`;

export const api = {
  runs: () => get("runs", { page_size: NEWEST_RUNS }),
  run: (run) => get(of(run)),
  services: () => get("services"),
  metrics: (run, names) => get(`${of(run)}/metrics`, { names, max_steps: 1000, thin: true }),
  dataflow: (run, step) => get(`${of(run)}/dataflow`, { step }),
  plan: (run) => get(`${of(run)}/plan`),
  samples: (run, step) => get(`${of(run)}/samples`, { step }),
  experts: (run, step) => get(`${of(run)}/experts`, { step }),
  devices: (run, since) => get(`${of(run)}/devices`, since ? { since } : {}),
  alerts: (run) => get(`${of(run)}/alerts`),
  log: (run, log, offset) => get(`${of(run)}/logs/${encodeURIComponent(log)}`, { offset }),
  pause: (run) => post(`${of(run)}/pause`),
  resume: (run) => post(`${of(run)}/resume`),
  stop: (run) => post(`${of(run)}/stop`),
  checkpoint: (run, requestId) => post(`${of(run)}/checkpoint`, { request_id: requestId }),
};

/** Events of a run after one, as {id, kind, event}; ends when the coordinator ends the stream.
 * onOpen(isOver) is called once it answers; it is over where the run has no further event. */
export async function* events(run, after, signal, onOpen) {
  const headers = { accept: "text/event-stream" };
  if (after) headers["last-event-id"] = after;
  const silence = new AbortController();
  const answer = await response(`${of(run)}/events`, {
    headers, signal: AbortSignal.any([signal, silence.signal]),
  });
  onOpen(answer.status === 204);
  if (answer.status === 204) return;
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let timer = null;
  try {
    for (;;) {
      clearTimeout(timer);
      timer = setTimeout(() => silence.abort(new Error("the coordinator is silent")), SILENCE_MS);
      const { done, value } = await reader.read();
      if (done) return;
      // A line ends with CR LF, CR or LF; a CR at the very end may be half of a CR LF.
      const text = rest + value;
      const whole = text.endsWith("\r") ? text.slice(0, -1) : text;
      const blocks = whole.replace(/\r\n?/g, "\n").split("\n\n");
      rest = blocks.pop() + text.slice(whole.length);
      for (const block of blocks) {
        const event = parsed(block);
        if (event !== null) yield event;
      }
    }
  } finally {
    clearTimeout(timer);
    reader.cancel().catch(() => undefined); // It is broken or ended already.
  }
}

function parsed(block) {
  const fields = { id: "", event: "message", data: "" };
  const data = [];
  for (const line of block.split("\n")) {
    const colon = line.indexOf(":");
    if (colon === 0) continue;
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (name === "data") data.push(value);
    else fields[name] = value;
  }
  if (data.length === 0) return null;
  return { id: fields.id, kind: fields.event, event: JSON.parse(data.join("\n")) };
}
