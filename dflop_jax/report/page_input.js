// Wheel, pointer, keys and buttons: they change `view`, show a task's details, follow the pointer.

const MIN_RANGE_S = SPAN / 1e5; // shortest visible range
const tip = document.getElementById("tip");
const pointers = new Map(); // of a touch: id -> clientX
let drag = null;

function zoomed() {
  return view.to - view.from < SPAN * (1 - 1e-9);
}

function setView(from, to) {
  const length = Math.min(SPAN, Math.max(MIN_RANGE_S, to - from));
  view.from = Math.max(0, Math.min(SPAN - length, from));
  view.to = view.from + length;
  root.classList.toggle("zoomed", zoomed());
  const coarse = matchMedia("(pointer: coarse)").matches;
  const begin = coarse ? "Pinch or drag to zoom in." : "Wheel or drag to zoom in; arrow keys step through tasks.";
  document.getElementById("hint").textContent = zoomed() ? "Drag to move; shift-drag to zoom in." : begin;
  if (coarse && zoomed()) document.getElementById("hint").textContent = "Drag to move.";
  schedule();
}

function zoom(factor, at = (view.from + view.to) / 2) {
  setView(at - (at - view.from) * factor, at + (view.to - at) * factor);
}

function pan(share) {
  const by = (view.to - view.from) * share;
  setView(view.from + by, view.to + by);
}

function timeAt(clientX) {
  const left = panels[0].plot.getBoundingClientRect().left;
  return view.from + ((clientX - left) / box.inner) * (view.to - view.from);
}

// ---- details ----

function showTip(title, rows, x, y) {
  tip.replaceChildren();
  html(tip, "b", {}, title);
  const list = html(tip, "dl");
  for (const [name, value] of rows) {
    html(list, "dt", {}, name);
    html(list, "dd", {}, value);
  }
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(6, Math.min(innerWidth - width - 6, x + 14))}px`;
  tip.style.top = `${y + 18 + height < innerHeight ? y + 18 : Math.max(6, y - height - 12)}px`;
}

function details(panel, i) {
  const [row, from, to, , segment, direction, group, bucket] = panel.data.tasks[i];
  const rows = [["submesh", panel.data.rows[row].name]];
  if (group >= 0) rows.push(["group", `${group}`]);
  if (bucket) rows.push(["bucket", bucket]);
  rows.push(["start", moment(from)], ["duration", duration(to - from)], ["trace", panel.data.title]);
  return [`${segment} ${direction}`, rows];
}

function showTask(panel, i, x, y) {
  const [title, rows] = details(panel, i);
  showTip(title, rows, x, y);
}

function bytesAt(curve, seconds) {
  let k = 0;
  while (k + 1 < curve.times_s.length && curve.times_s[k + 1] <= seconds) k++;
  return curve.bytes[k];
}

function showMemory(panel, seconds, x, y) {
  const rows = panel.data.memory.map((m) => [m.name, bytesAt(m, seconds)]);
  rows.sort((a, b) => b[1] - a[1]);
  const shown = rows.slice(0, 8).map(([name, value]) => [name, bytes(value)]);
  if (rows.length > 8) shown.push(["", `and ${rows.length - 8} with less memory`]);
  showTip(`memory at ${moment(seconds)}`, shown, x, y);
}

function leave() {
  tip.hidden = true;
  for (const panel of panels) panel.hair.setAttribute("visibility", "hidden");
}

function point(event, panel) {
  const seconds = timeAt(event.clientX), x = xOf(seconds);
  for (const p of panels) {
    p.hair.setAttribute("x1", x);
    p.hair.setAttribute("x2", x);
    p.hair.setAttribute("visibility", "visible");
  }
  const y = event.clientY - panel.out.getBoundingClientRect().top;
  if (event.target.task !== undefined) showTask(panel, event.target.task, event.clientX, event.clientY);
  else if (panel.memory && y > panel.memory.top - 8 && seconds <= panel.data.makespan_s) {
    showMemory(panel, seconds, event.clientX, event.clientY);
  } else tip.hidden = true;
}

// ---- the pointer ----

function press(event, panel) {
  if (event.button !== 0) return;
  pointers.set(event.pointerId, event.clientX);
  panel.plot.setPointerCapture(event.pointerId);
  const range = { ...view };
  if (pointers.size === 2) {
    const [a, b] = [...pointers.values()];
    drag = { kind: "pinch", times: [timeAt(a), timeAt(b)] };
  } else {
    const kind = event.shiftKey || !zoomed() ? "band" : "move";
    drag = { kind, x: event.clientX, at: timeAt(event.clientX), range, target: event.target, moved: false };
  }
}

function move(event, panel) {
  if (!drag) return point(event, panel);
  pointers.set(event.pointerId, event.clientX);
  if (drag.kind === "pinch" && pointers.size === 2) {
    const left = panel.plot.getBoundingClientRect().left;
    const [a, b] = [...pointers.values()].map((x) => (x - left) / box.inner);
    const length = (drag.times[1] - drag.times[0]) / (b - a || 1e-9);
    if (length > 0) setView(drag.times[0] - a * length, drag.times[0] - a * length + length);
    return;
  }
  drag.moved ||= Math.abs(event.clientX - drag.x) > 4;
  if (!drag.moved) return;
  tip.hidden = true;
  if (drag.kind === "move") {
    root.classList.add("dragging");
    const by = ((event.clientX - drag.x) / box.inner) * (drag.range.to - drag.range.from);
    setView(drag.range.from - by, drag.range.to - by);
  } else if (drag.kind === "band") {
    const [a, b] = [xOf(drag.at), xOf(timeAt(event.clientX))].sort((p, q) => p - q);
    for (const p of panels) {
      p.band.setAttribute("x", a);
      p.band.setAttribute("width", b - a);
      p.band.setAttribute("visibility", "visible");
    }
  }
}

function release(event, panel) {
  pointers.delete(event.pointerId);
  if (!drag) return;
  const { kind, at, moved, target } = drag;
  drag = null;
  root.classList.remove("dragging");
  for (const p of panels) p.band.setAttribute("visibility", "hidden");
  if (event.type === "pointercancel") return;
  if (kind === "band" && moved) {
    const [from, to] = [at, timeAt(event.clientX)].sort((p, q) => p - q);
    setView(from, to);
  } else if (!moved && target?.task !== undefined) focusTask(panel, target.task);
}

function wheel(event) {
  const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
  const by = event.deltaMode === 0 ? 1 : 30;
  // When everything is visible, zooming out and moving do nothing, so the page scrolls.
  if (!zoomed() && (sideways || event.deltaY > 0)) return;
  event.preventDefault();
  if (sideways) pan((((event.deltaX || event.deltaY) * by) / box.inner));
  else zoom(Math.exp(Math.max(-120, Math.min(120, event.deltaY * by)) * 0.0025), timeAt(event.clientX));
}

// ---- keys ----

function focusTask(panel, i) {
  const [, from, to] = panel.data.tasks[i], length = view.to - view.from;
  if (to < view.from || from > view.to) setView((from + to - length) / 2, (from + to + length) / 2);
  for (const bar of panel.plot.querySelectorAll("[tabindex]")) bar.removeAttribute("tabindex");
  const bar = panel.bars[i], [title, rows] = details(panel, i);
  bar.setAttribute("tabindex", "0");
  bar.setAttribute("aria-label", `${title}, ${rows.map((r) => r.join(" ")).join(", ")}`);
  draw(); // focus needs it displayed
  bar.focus({ preventScroll: false });
}

/** The task that an arrow key selects: the next of the submesh, or the nearest of the next submesh. */
function neighbour(panel, i, key) {
  const [row, from, to] = panel.data.tasks[i];
  if (key === "ArrowLeft" || key === "ArrowRight") {
    return panel.byRow[row][panel.position[i] + (key === "ArrowRight" ? 1 : -1)];
  }
  const step = key === "ArrowDown" ? 1 : -1, middle = (k) => panel.data.tasks[k][1] + panel.data.tasks[k][2];
  let next = row + step;
  while (panel.byRow[next] && !panel.byRow[next].length) next += step;
  const far = (k) => Math.abs(middle(k) - from - to);
  return panel.byRow[next]?.reduce((best, k) => (far(k) < far(best) ? k : best));
}

function key(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const bar = event.target.task === undefined ? null : event.target;
  const panel = bar && panels.find((p) => p.bars[bar.task] === bar);
  const middle = bar ? panel.data.tasks[bar.task].slice(1, 3).reduce((a, b) => a + b) / 2 : undefined;
  const arrow = event.key.startsWith("Arrow");
  if (event.key === "+" || event.key === "=") zoom(0.5, middle);
  else if (event.key === "-" || event.key === "_") zoom(2, middle);
  else if (event.key === "0") setView(0, SPAN);
  else if (event.key === "Escape") tip.hidden = true;
  else if (arrow && bar && !event.shiftKey) {
    const next = neighbour(panel, bar.task, event.key);
    if (next !== undefined) focusTask(panel, next);
  } else if (event.key === "ArrowLeft" || event.key === "ArrowRight") pan(event.key === "ArrowLeft" ? -0.2 : 0.2);
  else return;
  event.preventDefault();
}

function focused(event) {
  const panel = panels.find((p) => p.bars[event.target.task] === event.target);
  if (!panel) return;
  const at = event.target.getBoundingClientRect();
  showTask(panel, event.target.task, Math.max(0, at.left), at.bottom - 12);
}

function listen() {
  for (const panel of panels) {
    panel.plot.addEventListener("pointerdown", (e) => press(e, panel));
    panel.plot.addEventListener("pointermove", (e) => move(e, panel));
    panel.plot.addEventListener("pointerup", (e) => release(e, panel));
    panel.plot.addEventListener("pointercancel", (e) => release(e, panel));
    panel.plot.addEventListener("pointerleave", leave);
    panel.plot.addEventListener("dblclick", () => setView(0, SPAN));
    panel.plot.addEventListener("wheel", wheel, { passive: false });
    panel.plot.addEventListener("focusin", focused);
    panel.plot.addEventListener("focusout", () => { tip.hidden = true; });
  }
}

function start() {
  layout();
  listen();
  setView(view.from, view.to);
}

if (root) {
  start();
  root.addEventListener("keydown", key);
  const act = { in: () => zoom(0.5), out: () => zoom(2), reset: () => setView(0, SPAN) };
  for (const button of root.querySelectorAll("button")) button.addEventListener("click", act[button.dataset.do]);
  let width = box.width;
  addEventListener("resize", () => {
    if (document.getElementById("panels").clientWidth === width) return;
    width = document.getElementById("panels").clientWidth;
    start();
  });
}
