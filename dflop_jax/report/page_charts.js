// Draws the charts over steps: DATA.charts over DATA.axes (see charts.py), each in a figure of its own.

const CHART = { height: 168, left: 66, right: 10, top: 8, bottom: 20 };
const figures = new Map(); // title -> its figure

/** [unit's name, factor] that show values of a unit whose largest value is `max`. */
function scaleOf(unit, max) {
  if (unit === "s") { const [name, per] = unitOf(max); return [` ${name}`, per]; }
  if (unit === "%") return ["%", 100];
  if (unit === "bytes") {
    const power = max >= 1 ? Math.min(4, Math.floor(Math.log2(max) / 10)) : 0;
    return [` ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`, 1024 ** -power];
  }
  if (unit === "FLOP/s") {
    const power = max >= 1 ? Math.min(5, Math.floor(Math.log10(max) / 3)) : 0;
    return [` ${["", "K", "M", "G", "T", "P"][power]}FLOP/s`, 1000 ** -power];
  }
  return ["", 1];
}

/** A value with at least three significant digits and its unit. */
function formatValue(unit, value) {
  if (value === null || value === undefined) return "–";
  const [name, per] = scaleOf(unit, Math.abs(value)), scaled = value * per;
  const size = scaled === 0 ? 0 : Math.floor(Math.log10(Math.abs(scaled)));
  if (unit === "" && size < -3) return scaled.toExponential(2);
  const digits = Number.isInteger(scaled) && unit === "" ? 0 : Math.max(0, (unit === "" ? 3 : 2) - size);
  return `${grouped(scaled, Math.min(digits, 6))}${name}`;
}

function present(values) {
  return values.filter((v) => v !== null);
}

/** [low, high] limits of an axis, with low < high. */
function rangeOf(values, fromZero) {
  let low = fromZero ? 0 : Infinity, high = -Infinity;
  for (const v of values) { low = Math.min(low, v); high = Math.max(high, v); }
  if (!(high >= low)) return [0, 1];
  if (high === low) return fromZero ? [0, high || 1] : [low - (Math.abs(low) / 10 || 0.5), high + (Math.abs(high) / 10 || 0.5)];
  const margin = 0.05 * (high - low);
  return [fromZero && low === 0 ? 0 : low - margin, high + margin];
}

/** The height of each line: its values, or for a stack the sum of all lines up to it. */
function heightsOf(chart) {
  if (!chart.stacked) return chart.lines.map((line) => line.y);
  let below = [];
  return chart.lines.map((line) => {
    below = line.y.map((v, i) => (v ?? 0) + (below[i] ?? 0));
    return below;
  });
}

function figureOf(chart) {
  if (!figures.has(chart.title)) {
    const figure = html(document.getElementById("charts"), "figure", { class: "chart" });
    html(figure, "figcaption", {}, chart.title);
    const out = svg(figure, "svg", { height: CHART.height, role: "img", tabindex: 0 });
    const made = { figure, out, key: html(figure, "ul", { class: "legend" }), at: null };
    out.addEventListener("pointermove", (e) => showAt(made, e.clientX, e.clientX, e.clientY));
    out.addEventListener("pointerleave", () => hideAt(made));
    out.addEventListener("blur", () => hideAt(made));
    out.addEventListener("keydown", (e) => stepThrough(made, e));
    figures.set(chart.title, made);
  }
  return figures.get(chart.title);
}

function drawCharts() {
  for (const chart of DATA.charts) drawChart(figureOf(chart), chart);
  document.getElementById("progress").hidden = DATA.charts.length === 0;
}

function drawChart(made, chart) {
  const { out, key } = made, width = made.figure.clientWidth, { height, left, right, top, bottom } = CHART;
  const heights = heightsOf(chart), xs = chart.lines.map((line) => DATA.axes[line.axis]);
  const places = xs.flat(), ends = [Math.min(...places), Math.max(...places)];
  const [first, last] = ends[0] < ends[1] ? ends : rangeOf(places, false);
  const [low, high] = rangeOf(present(heights.flat()), chart.from_zero);
  const x = (v) => left + ((v - first) / (last - first)) * (width - left - right);
  const y = (v) => top + ((high - v) / (high - low)) * (height - top - bottom);
  Object.assign(made, { chart, xs, x });
  out.replaceChildren();
  const [name, per] = scaleOf(chart.unit, Math.max(Math.abs(low), Math.abs(high)));
  const [levels, step] = ticks(low * per, high * per, 4);
  for (const level of levels) {
    svg(out, "line", { class: "gridline", x1: left, x2: width - right, y1: y(level / per), y2: y(level / per) });
    const text = `${grouped(level, decimals(step))}${name}`;
    svg(out, "text", { class: "faint", x: left - 8, y: y(level / per) + 4, "text-anchor": "end" }, text);
  }
  const [marks, apart] = ticks(first, last, Math.max(2, Math.floor((width - left) / 90)));
  for (const mark of marks) {
    const at = x(mark), anchor = at > width - 24 ? "end" : "middle";
    svg(out, "text", { class: "faint", x: at, y: height - 4, "text-anchor": anchor }, grouped(mark, decimals(apart)));
  }
  svg(out, "text", { class: "faint", x: 0, y: height - 4 }, "step");
  chart.lines.forEach((line, i) => {
    const below = chart.stacked ? heights[i - 1] ?? heights[i].map(() => 0) : null;
    drawLine(out, line, xs[i].map(x), heights[i].map((v) => (v === null ? null : y(v))), below?.map(y));
  });
  made.hair = svg(out, "line", { class: "hair", y1: top, y2: height - bottom, visibility: "hidden" });
  key.replaceChildren();
  const lasts = chart.lines.map((line) => present(line.y).at(-1));
  chart.lines.forEach((line, i) => {
    const item = html(key, "li"), swatch = html(item, "i");
    swatch.style.background = line.colour;
    item.append(`${line.name} `);
    html(item, "b", {}, formatValue(chart.unit, lasts[i]));
  });
  const lastValues = chart.lines.map((line, i) => `${line.name} ${formatValue(chart.unit, lasts[i])}`);
  out.setAttribute("aria-label", `${chart.title}, last values: ${lastValues.join(", ")}`);
}

function drawLine(out, line, xs, ys, below) {
  if (below) {
    const over = xs.map((x, i) => `${x} ${ys[i]}`), under = xs.map((x, i) => `${x} ${below[i]}`).reverse();
    const wide = xs.length === 1 ? [`${xs[0] + 3} ${ys[0]}`, `${xs[0] + 3} ${below[0]}`] : [];
    svg(out, "path", { class: "layer", d: `M${[...over, ...wide, ...under].join("L")}Z` }).style.fill = line.colour;
    return;
  }
  let path = "", drawn = 0;
  ys.forEach((y, i) => {
    if (y === null) return;
    path += `${i > 0 && ys[i - 1] !== null ? "L" : "M"}${xs[i]} ${y}`;
    drawn++;
  });
  const dash = DASHES[line.dash % DASHES.length];
  svg(out, "path", { class: "curve", d: path, "stroke-dasharray": dash }).style.stroke = line.colour;
  const at = (i) => ys[i] ?? null;
  ys.forEach((y, i) => { // circles make single points visible
    if (y !== null && (drawn <= 24 || (at(i - 1) === null && at(i + 1) === null))) svg(out, "circle", { cx: xs[i], cy: y, r: 2.2 }).style.fill = line.colour;
  });
}

// ---- values at the pointer ----

function nearest(xs, value) {
  let best = 0;
  for (let i = 1; i < xs.length; i++) if (Math.abs(xs[i] - value) < Math.abs(xs[best] - value)) best = i;
  return best;
}

function showAt(made, at, tipX, tipY) {
  const { chart, xs, x, out, hair } = made, left = out.getBoundingClientRect().left;
  const longest = xs.reduce((a, b) => (b.length > a.length ? b : a), []);
  if (!longest.length) return;
  made.at = nearest(longest.map(x), at - left);
  const here = longest[made.at];
  hair.setAttribute("x1", x(here));
  hair.setAttribute("x2", x(here));
  hair.setAttribute("visibility", "visible");
  const rows = chart.lines.map((line, i) => [line.name, formatValue(chart.unit, line.y[nearest(xs[i], here)])]);
  showTip(`step ${formatValue("", here)}`, rows, tipX, tipY);
}

function hideAt(made) {
  made.hair?.setAttribute("visibility", "hidden");
  tip.hidden = true;
}

function stepThrough(made, event) {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!by || !made.chart) return;
  const longest = made.xs.reduce((a, b) => (b.length > a.length ? b : a), []);
  const next = Math.max(0, Math.min(longest.length - 1, (made.at ?? longest.length) + by));
  const box = made.out.getBoundingClientRect(), at = box.left + made.x(longest[next]);
  showAt(made, at, at, box.top + 40);
  event.preventDefault();
}

drawCharts();
addEventListener("resize", drawCharts);
