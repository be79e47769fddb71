"use strict";
// Draws the timelines of the embedded data under one time axis. `view` is what the axis shows; all
// times are seconds. page_input.js turns wheel, pointer and keys into changes of `view`.

const DATA = JSON.parse(document.getElementById("data").textContent);
const SPAN = Math.max(0, ...DATA.panels.map((p) => p.makespan_s));
const MAX_BYTES = Math.max(0, ...DATA.panels.flatMap((p) => p.memory.map((m) => m.peak)));
const MEMORY_HEIGHT = 84, NARROW = 600; // pixels
// Pixels: height of a row, top of the row to top of its bar, height of the bar; link rows are thin.
const ROWS = { wide: [27, 3, 20], wideLink: [15, 3, 9], narrow: [42, 20, 20], narrowLink: [29, 18, 8] };
const DASHES = ["", "7 3", "2 3", "9 3 2 3"];
const root = document.getElementById("timelines");
const view = { from: 0, to: SPAN };
const axis = { svg: null, marks: null };
let panels = [], box = null, pending = false;

function html(parent, tag, attributes = {}, text = "") {
  return add(parent, document.createElement(tag), attributes, text);
}

function svg(parent, tag, attributes = {}, text = "") {
  return add(parent, document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, text);
}

function add(parent, node, attributes, text) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== "") node.textContent = text; // never parsed: names come from users
  parent.append(node);
  return node;
}

// ---- numbers with units ----

function unitOf(seconds) {
  return seconds >= 1 ? ["s", 1] : seconds >= 1e-3 ? ["ms", 1e3] : ["µs", 1e6];
}

function decimals(step) {
  return Math.max(0, Math.min(9, -Math.floor(Math.log10(step) + 1e-9)));
}

function grouped(value, digits) {
  return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** A duration at three significant digits. */
function duration(seconds) {
  const [unit, per] = unitOf(seconds), value = seconds * per;
  return `${grouped(value, value >= 100 || value === 0 ? 0 : value >= 10 ? 1 : 2)} ${unit}`;
}

/** A time with enough digits to distinguish a thousandth of the visible range. */
function moment(seconds, withUnit = true) {
  const [unit, per] = unitOf(view.to - view.from);
  const text = grouped(seconds * per, decimals(((view.to - view.from) * per) / 1000));
  return withUnit ? `${text} ${unit}` : text;
}

function bytes(value) {
  if (value === 0) return "0";
  const power = value >= 1 ? Math.min(4, Math.floor(Math.log2(value) / 10)) : 0;
  const scaled = value / 1024 ** power;
  return `${grouped(scaled, power === 0 || scaled >= 100 ? 0 : 1)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

/** [about `n` round values from `from` to `to`, the distance between them]. */
function ticks(from, to, n) {
  const rough = (to - from) / n, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((k) => k * power >= rough * 0.999);
  const values = [];
  for (let i = Math.ceil(from / step - 1e-9); i * step <= to + step * 1e-9; i++) values.push(i * step + 0); // no -0
  return [values, step];
}

function byteTicks(max) {
  const unit = 1024 ** Math.max(0, Math.floor(Math.log2(Math.max(max, 1)) / 10));
  return ticks(0, max / unit, 2)[0].slice(1).map((v) => v * unit);
}

// ---- layout: once per width ----

function layout() {
  const width = document.getElementById("panels").clientWidth;
  const longest = Math.max(6, ...DATA.panels.flatMap((p) => p.rows.map((r) => r.name.length)));
  const narrow = width < NARROW;
  const left = narrow ? 0 : Math.min(190, 14 + 7.4 * longest), right = narrow ? 0 : 52;
  box = { width, narrow, left, right, inner: width - left - right, head: narrow ? 0 : 15 };
  document.getElementById("axis").replaceChildren();
  axis.svg = svg(document.getElementById("axis"), "svg", { height: 40 });
  axis.marks = svg(axis.svg, "g");
  document.getElementById("panels").replaceChildren();
  panels = DATA.panels.map(makePanel);
  draw();
}

function makePanel(data, index) {
  const figure = html(document.getElementById("panels"), "figure", { class: "panel" });
  const caption = html(figure, "figcaption");
  html(caption, "b", {}, data.title);
  html(caption, "span", {}, `makespan ${duration(data.makespan_s)}`);
  if (data.note) html(caption, "span", {}, data.note);
  const below = data.memory.length ? MEMORY_HEIGHT + 26 : 0;
  const rows = placed(data.rows), bars = rows.foot, height = bars + below + 2;
  const out = svg(figure, "svg", { height, role: "group", "aria-label": `Timeline of ${data.title}` });
  const panel = { data, index, out, rows, bars: [], curves: [], byRow: data.rows.map(() => []), position: [] };
  // tabindex -1: a click focuses the plot, so that keys work; the tab key skips it.
  panel.plot = svg(out, "svg", { class: "plot", x: box.left, width: box.inner, height, tabindex: -1 });
  svg(panel.plot, "rect", { class: "catch", width: box.inner, height });
  panel.grounds = data.rows.map((row, r) => {
    const [y, height] = rows[r], middle = box.narrow ? y - 6 : y + height / 2 + 4;
    const look = row.link ? "faint link" : "", x = box.narrow ? 0 : box.left - 10;
    svg(out, "text", { x, y: middle, "text-anchor": box.narrow ? "start" : "end", class: look }, shortened(row.name));
    const busy = box.narrow ? `busy ${row.busy}` : row.busy, side = box.narrow ? "faint" : look;
    svg(out, "text", { x: box.width, y: middle, "text-anchor": "end", class: side }, busy);
    return svg(panel.plot, "rect", { class: "ground", y, height });
  });
  if (!box.narrow) svg(out, "text", { class: "faint", x: box.width, y: 10, "text-anchor": "end" }, "busy");
  panel.grid = svg(panel.plot, "g");
  panel.tasks = svg(panel.plot, "g");
  data.tasks.forEach((task, i) => {
    const bar = svg(panel.tasks, "rect", { class: "task", y: rows[task[0]][0], height: rows[task[0]][1], role: "img" });
    bar.style.fill = `var(--c${task[3]})`;
    bar.task = i;
    panel.bars.push(bar);
    panel.byRow[task[0]].push(i);
  });
  for (const mine of panel.byRow) {
    mine.sort((a, b) => data.tasks[a][1] - data.tasks[b][1] || a - b);
    mine.forEach((i, at) => { panel.position[i] = at; });
  }
  panel.bars[panel.byRow.flat()[0]]?.setAttribute("tabindex", "0");
  panel.numbers = svg(panel.plot, "g");
  if (below) makeMemory(panel, figure, bars + 24);
  panel.end = svg(panel.plot, "line", { class: "end", y1: box.head - 4, y2: bars });
  panel.band = svg(panel.plot, "rect", { class: "band", height, visibility: "hidden" });
  panel.hair = svg(panel.plot, "line", { class: "hair", y2: height, visibility: "hidden" });
  return panel;
}

/** [top, height] of each row's bar; `foot` is the bottom of the last row. */
function placed(rows) {
  let top = box.head;
  const places = rows.map((row) => {
    const [whole, above, bar] = ROWS[`${box.narrow ? "narrow" : "wide"}${row.link ? "Link" : ""}`];
    top += whole;
    return [top - whole + above, bar];
  });
  return Object.assign(places, { foot: top });
}

function shortened(name) {
  const maxLength = box.narrow ? 34 : 24;
  return name.length <= maxLength ? name : `${name.slice(0, maxLength - 1)}…`;
}

function makeMemory(panel, figure, top) {
  const { out, plot, data } = panel, bottom = top + MEMORY_HEIGHT;
  const y = (value) => bottom - (value / (MAX_BYTES * 1.04)) * MEMORY_HEIGHT;
  svg(out, "text", { x: box.left, y: top - 7, class: "faint" }, "memory per device");
  for (const value of [0, ...byteTicks(MAX_BYTES)]) {
    svg(out, "line", { class: "gridline", x1: box.left, x2: box.left + box.inner, y1: y(value), y2: y(value) });
    const x = box.narrow ? box.width : box.left - 10;
    if (!box.narrow || value) {
      svg(out, "text", { class: "faint", x, y: y(value) + (box.narrow ? -3 : 4), "text-anchor": "end" }, bytes(value));
    }
  }
  out.append(plot); // above the lines
  panel.memory = { top, bottom, y };
  const key = html(figure, "ul", { class: "legend memory" });
  data.memory.forEach((m, i) => {
    const dash = DASHES[data.memory.slice(0, i).filter((o) => o.colour === m.colour).length % DASHES.length];
    const curve = svg(plot, "path", { class: "curve", "stroke-dasharray": dash });
    curve.style.stroke = `var(--c${m.colour})`;
    panel.curves.push(curve);
    const item = html(key, "li");
    const swatch = svg(svg(item, "svg", { width: 22, height: 10, style: "display:inline; width:22px; margin-right:6px" }),
      "line", { x2: 22, y1: 5, y2: 5, "stroke-width": 2, "stroke-dasharray": dash });
    swatch.style.stroke = `var(--c${m.colour})`;
    item.append(`${m.name}, at most ${bytes(m.peak)}`);
  });
}

// ---- drawing: at every change of the view ----

function schedule() {
  if (pending) return;
  pending = true;
  requestAnimationFrame(() => { pending = false; draw(); });
}

function xOf(seconds) {
  return ((seconds - view.from) / (view.to - view.from)) * box.inner;
}

function draw() {
  const [unit, per] = unitOf(view.to - view.from);
  const [values, step] = ticks(view.from * per, view.to * per, Math.max(3, Math.floor(box.inner / 110)));
  axis.marks.replaceChildren();
  svg(axis.marks, "text", { class: "faint", x: box.left, y: 12 }, `time from the start of the step (${unit})`);
  svg(axis.marks, "line", { class: "axis-line", x1: box.left, x2: box.left + box.inner, y1: 39, y2: 39 });
  for (const value of values) {
    const x = box.left + xOf(value / per), text = grouped(value, decimals(step));
    svg(axis.marks, "line", { class: "axis-line", x1: x, x2: x, y1: 34, y2: 39 });
    const anchor = x < 14 ? "start" : x > box.width - 14 ? "end" : "middle";
    svg(axis.marks, "text", { class: "faint", x, y: 29, "text-anchor": anchor }, text);
  }
  for (const panel of panels) drawPanel(panel, values.map((v) => xOf(v / per)));
  const range = document.getElementById("range");
  range.textContent = `${moment(view.from, false)} – ${moment(view.to)}`;
  range.dataset.from = view.from;
  range.dataset.to = view.to;
}

function drawPanel(panel, lines) {
  const { data, grid, numbers } = panel, inside = (x) => Math.max(-20, Math.min(box.inner + 20, x));
  grid.replaceChildren();
  for (const x of lines) svg(grid, "line", { class: "grid", x1: x, x2: x, y1: box.head, y2: panel.rows.foot });
  const end = xOf(data.makespan_s);
  for (const ground of panel.grounds) {
    ground.setAttribute("x", inside(xOf(0)));
    ground.setAttribute("width", Math.max(0, inside(end) - inside(xOf(0))));
  }
  panel.end.setAttribute("x1", end);
  panel.end.setAttribute("x2", end);
  numbers.replaceChildren();
  data.tasks.forEach(([row, from, to, colour, , , group], i) => {
    const bar = panel.bars[i], seen = to >= view.from && from <= view.to;
    if (seen === (bar.style.display === "none")) bar.style.display = seen ? "" : "none";
    if (!seen) return;
    const left = inside(xOf(from)), width = Math.max(0.6, inside(xOf(to)) - left);
    bar.setAttribute("x", left);
    bar.setAttribute("width", width);
    bar.classList.toggle("wide", width >= 4); // a narrow bar has no border, which would hide its colour
    const first = Math.max(0, left), shown = Math.min(box.inner, left + width) - first, text = `${group}`;
    if (group < 0 || data.rows[row].link || shown < 7 * text.length + 6) return;
    const [top, height] = panel.rows[row];
    const number = svg(numbers, "text", { class: "number", x: first + shown / 2, y: top + height / 2 + 4 }, text);
    number.style.fill = `var(--c${colour}-ink)`;
  });
  panel.curves.forEach((curve, i) => {
    const { times_s: times, bytes: values } = data.memory[i], { y } = panel.memory;
    let path = "";
    for (let k = 0; k < times.length; k++) {
      path += k === 0 ? `M${inside(xOf(times[k]))} ${y(values[k])}` : `H${inside(xOf(times[k]))}V${y(values[k])}`;
    }
    curve.setAttribute("d", path);
  });
}
