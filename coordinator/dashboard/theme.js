// The theme (light, dark, or that of the system), and the page's colours for canvases.

const KEY = "rolemesh.theme";
const CHOICES = ["auto", "light", "dark"];
const listeners = new Set();
let resolved = new Map();
let probe = null;
let font = null;

export function onThemeChange(listener) {
  listeners.add(listener);
}

/** A colour of the style sheet, e.g. "line-1", as canvases take it. */
export function colour(name) {
  if (!resolved.has(name)) {
    if (probe === null) {
      probe = document.createElement("span");
      probe.hidden = true;
      document.body.append(probe);
    }
    probe.style.color = `var(--${name})`;
    resolved.set(name, getComputedStyle(probe).color);
  }
  return resolved.get(name);
}

/** The colour with an opacity, 0 to 1. */
export function faded(name, opacity) {
  return colour(name).replace("rgb(", "rgba(").replace(")", `, ${opacity})`);
}

/** The page's type, as canvases take it. */
export function canvasFont() {
  font ??= `11px ${getComputedStyle(document.body).fontFamily}`;
  return font;
}

/** Colour of the n-th line of a chart. */
export function lineColour(place) {
  return `line-${(place % 8) + 1}`;
}

export function startTheme(button) {
  const saved = localStorage.getItem(KEY);
  apply(CHOICES.includes(saved) ? saved : "auto", button);
  button.addEventListener("click", () => nextTheme(button));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
}

export function nextTheme(button) {
  const now = document.documentElement.dataset.theme;
  const next = CHOICES[(CHOICES.indexOf(now) + 1) % CHOICES.length];
  localStorage.setItem(KEY, next);
  apply(next, button);
}

function apply(choice, button) {
  document.documentElement.dataset.theme = choice;
  button.textContent = `Theme: ${choice}`;
  button.title = "Theme: as the system, light or dark (t)";
  changed();
}

function changed() {
  resolved = new Map();
  for (const listener of listeners) listener();
}
