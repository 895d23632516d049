// Elements. All text becomes text nodes: nothing that the mesh sends is ever parsed as HTML.

export function byId(id) {
  return document.getElementById(id);
}

/** An element with attributes ("on..." are listeners) and children (strings become text). */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** Sets text only where it differs, so that screen readers and selections are left in peace. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Makes the children of a node those of the items, keeping elements (and focus) by key. */
export function keyed(parent, items, keyOf, create, update) {
  const old = new Map();
  for (const child of parent.children) old.set(child.dataset.key, child);
  let at = parent.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    let node = old.get(key);
    if (node === undefined) {
      node = create(item);
      node.dataset.key = key;
    }
    old.delete(key);
    update(node, item);
    if (node === at) at = at.nextElementSibling;
    else parent.insertBefore(node, at);
  }
  for (const node of old.values()) node.remove();
}

/** What a panel shows while it has nothing to show: what is missing, and what to do. */
export function emptyState(text, remedy = "") {
  return el("p", { class: "empty" }, text, remedy ? el("span", { class: "quiet" }, ` ${remedy}`) : null);
}

/** A choice: entries are [value, text]; onchange is called with the value that is chosen. */
export function select(label, entries, onchange) {
  return el("select", { "aria-label": label, onchange: (event) => onchange(event.target.value) },
    ...entries.map(([value, text]) => el("option", { value }, text)));
}

/** A table with headings [text, class of the column], and its other parts. */
export function table(heads, ...parts) {
  const line = heads.map(([text, kind]) => el("th", { scope: "col", class: kind }, text));
  return el("table", {}, el("thead", {}, el("tr", {}, ...line)), ...parts);
}

/** A box for what is wider than the page, which keys can move. */
export function scrolled(label, ...children) {
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, ...children);
}

/** A canvas's context with its bitmap at the screen's own resolution; width and height in CSS px. */
export function prepared(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}
