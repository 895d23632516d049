// Numbers, times and sizes as text.

const NONE = "\u2013";
const plain = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

/** Four digits that count; powers of ten for what is very small or large. */
export function number(value) {
  if (!isNumber(value)) return NONE;
  const size = Math.abs(value);
  if (size >= 1e7 || (size > 0 && size < 1e-3)) return value.toExponential(2);
  return size >= 1000 ? whole.format(value) : plain.format(value);
}

export function count(value) {
  return isNumber(value) ? whole.format(value) : NONE;
}

export function percent(share) {
  if (!isNumber(share)) return NONE;
  return `${share < 0.0995 && share > 0 ? (100 * share).toFixed(1) : Math.round(100 * share)} %`;
}

export function seconds(value) {
  if (!isNumber(value)) return NONE;
  if (value === 0) return "0 s";
  if (value < 0.9995) return `${plain.format(Number((1000 * value).toPrecision(3)))} ms`;
  if (value < 120) return `${value.toPrecision(value < 9.995 ? 3 : value < 99.95 ? 3 : 4)} s`;
  const minutes = Math.floor(value / 60);
  if (minutes < 120) return `${minutes} min ${Math.round(value % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function bytes(value) {
  if (!isNumber(value)) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let size = value;
  let unit = 0;
  while (size >= 1024 && unit < units.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? size : size.toFixed(size < 10 ? 1 : 0)} ${units[unit]}`;
}

/** Without zeros that say nothing: for marks of an axis. */
export function brief(text) {
  return text.replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "");
}

/** Time of day of a Date. */
export function clock(date) {
  return date.toLocaleTimeString("en-GB", { hour12: false });
}

export function dateAndTime(date) {
  return `${date.toLocaleDateString("en-CA")} ${clock(date)}`;
}

/** "3 runs", "1 run". */
export function counted(n, noun) {
  return `${count(n)} ${noun}${n === 1 ? "" : "s"}`;
}
