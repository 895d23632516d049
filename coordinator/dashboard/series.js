// Arithmetic of curves. Arrays hold NaN where there is no value.

/** Exponential moving mean without the bias of its start: m_t = w m_{t-1} + (1 - w) x_t, given as
 * m_t / (1 - w^t), over the values that there are. */
export function smoothed(values, weight) {
  if (weight <= 0) return values;
  let mean = 0;
  let share = 1;
  return values.map((value) => {
    if (Number.isNaN(value)) return NaN;
    mean = weight * mean + (1 - weight) * value;
    share *= weight;
    return mean / (1 - share);
  });
}

/** Least and largest number of arrays; [Infinity, -Infinity] when there is none. */
export function extent(arrays) {
  let low = Infinity;
  let high = -Infinity;
  for (const values of arrays) {
    for (const value of values) {
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  return [low, high];
}

/** Round numbers that lie within a range, about so many. */
export function ticks(low, high, about) {
  const rough = (high - low) / about;
  if (!(rough > 0) || !Number.isFinite(rough)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough) * power;
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n += 1) {
    found.push(Number((n * step).toPrecision(12)));
  }
  return found;
}

/** Points of a line in pixels: of each pixel column the least and the largest, in their order. */
export function thinned(xs, values, toX, toY) {
  const points = [];
  let column = null;
  let kept = null;
  const flush = () => {
    if (kept === null) return;
    const first = Math.min(kept.low, kept.high);
    const last = Math.max(kept.low, kept.high);
    points.push([toX(xs[first]), toY(values[first])]);
    if (last > first) points.push([toX(xs[last]), toY(values[last])]);
    kept = null;
  };
  for (let row = 0; row < xs.length; row += 1) {
    const value = values[row];
    if (Number.isNaN(value)) continue;
    const at = Math.floor(toX(xs[row]));
    if (at !== column || kept === null) {
      flush();
      column = at;
      kept = { low: row, high: row };
    } else {
      if (value < values[kept.low]) kept.low = row;
      if (value > values[kept.high]) kept.high = row;
    }
  }
  flush();
  return points;
}

/** Row of the x nearest to one, of ascending xs; -1 when there is none. */
export function nearest(xs, x) {
  let [low, high] = [0, xs.length - 1];
  if (high < 0) return -1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle;
    else high = middle;
  }
  return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
}
