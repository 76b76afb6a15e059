// Put the page together: controls, pointer and keys, details, tables.
const data = JSON.parse(document.getElementById("data").textContent);
const element = (id) => document.getElementById(id);
const schedules = data.schedules.map((raw) => new Schedule(raw, data.kinds));
const chart = new Chart(element("chart"), element("memory"));
chart.unit = data.time_unit;
chart.memoryUnit = data.memory_unit;

function timeText(value) { return unitText(value, data.time_unit); }

function make(tag, text, attributes = {}) {
  const node = document.createElement(tag);
  if (text) node.textContent = text;
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

// Which schedule is shown.

function fillSelects() {
  const names = [...new Set(schedules.map((schedule) => schedule.name))];
  element("schedule").replaceChildren(...names.map((name) => make("option", name, { value: name })));
  element("schedule").addEventListener("change", () => choose(nearest(element("schedule").value)));
  element("microbatches").addEventListener("change", () => choose(Number(element("microbatches").value)));
}

// The schedule of that name whose number of microbatches is closest to the one shown.
function nearest(name) {
  const wanted = chart.schedule ? chart.schedule.microbatches : 0;
  const found = schedules.map((_, i) => i).filter((i) => schedules[i].name === name);
  found.sort((a, b) => Math.abs(schedules[a].microbatches - wanted) - Math.abs(schedules[b].microbatches - wanted));
  return found[0];
}

function choose(index) {
  const schedule = schedules[index];
  element("schedule").value = schedule.name;
  const same = schedules.map((_, i) => i).filter((i) => schedules[i].name === schedule.name);
  element("microbatches").replaceChildren(
    ...same.map((i) => make("option", schedules[i].microbatches, { value: i })));
  element("microbatches").value = String(index);
  element("transfers-label").hidden = !schedule.hasTransfers;
  markRows(index);
  for (const cell of document.querySelectorAll("[data-stage-rank]")) {
    cell.textContent = schedule.stage_to_rank[Number(cell.dataset.stageRank)] ?? "";
  }
  element("figures").textContent = [
    `${schedule.ranks} ranks, ${schedule.stages} stages, ${schedule.microbatches} microbatches`,
    `makespan ${timeText(schedule.makespan)}`, `idle ${percentText(schedule.idle)}`,
    schedule.memory.some((curve) => curve.length)
      ? `peak memory ${unitText(Math.max(0, ...schedule.peak), data.memory_unit)}` : "memory not measured"].join(" · ");
  element("chart").setAttribute("aria-label", `Timeline of ${schedule.name}, ${element("figures").textContent}`);
  chart.show(schedule);
  fillLegend(schedule);
  select(-1);
}

// The table shows schedules that can be compared: those with as many microbatches.
function markRows(index) {
  const counts = new Set(schedules.map((schedule) => schedule.microbatches));
  element("all-label").hidden = counts.size < 2;
  for (const row of document.querySelectorAll("tr[data-schedule]")) {
    const number = Number(row.dataset.schedule);
    row.classList.toggle("chosen", number === index);
    row.hidden = !element("all").checked && schedules[number].microbatches !== schedules[index].microbatches;
  }
}

function fillLegend(schedule) {
  const found = new Set();
  for (let i = 0; i < schedule.count; i += 1) schedule.partsOf(i).forEach(([kind]) => found.add(kind));
  const entries = data.kinds.map((kind, index) => ({ kind, index })).filter(({ kind, index }) => found.has(index) && kind.legend);
  element("legend").replaceChildren(...entries.map(({ kind }) => {
    const item = make("li");
    const swatch = make("canvas", "", { width: 36, height: 28, "aria-hidden": "true" });
    const context = swatch.getContext("2d");
    context.scale(2, 2);
    if (kind.transfer) { context.fillStyle = kind.colour; drawArrow(context, 0, 3, 18, 8, kind.direction); }
    else drawBox(context, { x: 0, y: 0, width: 18, height: 14, colour: mixColours(kind.colour, "#ffffff", 0.3), hatch: kind.hatch });
    item.append(swatch, kind.transfer ? kind.legend : `${kind.letter} ${kind.legend}`);
    return item;
  }));
}

// One action: tooltip and details.

function lines(i) {
  const schedule = chart.schedule;
  const waits = schedule.waits[i].map((s) => `${schedule.actionText(s)} on rank ${schedule.rank[s]}`);
  return [
    ...schedule.describe(i),
    `rank ${schedule.rank[i]}, starts at ${timeText(schedule.start[i])}, takes ${timeText(schedule.end[i] - schedule.start[i])}`,
    waits.length ? `waits for ${waits.join(", ")}` : "waits for nothing",
  ];
}

function showTip(i, x, y) {
  const tip = element("tip");
  tip.hidden = i < 0;
  if (i < 0) return;
  tip.replaceChildren(make("b", chart.schedule.actionText(i)), ...lines(i).map((line) => make("div", line)));
  const sheet = tip.parentElement;
  const left = Math.min(x + 14, sheet.clientWidth - tip.offsetWidth - 4);
  tip.style.left = `${Math.max(0, left)}px`;
  tip.style.top = `${y + 18}px`;
}

function select(i) {
  chart.selected = i;
  if (i >= 0) chart.reveal(i);
  const details = element("details");
  details.replaceChildren();
  if (i >= 0) {
    const schedule = chart.schedule;
    details.append(make("b", schedule.actionText(i)), ...lines(i).slice(0, -1).map((line) => make("div", line)));
    for (const [title, others] of [["Waits for", schedule.waits[i]], ["Read by", schedule.feeds[i]]]) {
      const row = make("div", `${title}: `);
      if (!others.length) row.append("nothing");
      for (const other of others) {
        const button = make("button", `${schedule.actionText(other)} (rank ${schedule.rank[other]})`, { type: "button" });
        button.addEventListener("click", () => { select(other); element("chart").focus(); });
        row.append(button);
      }
      details.append(row);
    }
  }
  chart.draw();
}

// Pointer.

const pointers = new Map();
let moved = false;

function at(event) {
  const box = element("chart").getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
}

function watchPointer() {
  const canvas = element("chart");
  canvas.addEventListener("pointerdown", (event) => {
    pointers.set(event.pointerId, at(event));
    moved = false;
    canvas.setPointerCapture(event.pointerId);
    canvas.classList.add("dragging");
  });
  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = at(event);
    if (!pointers.has(event.pointerId)) { hover(x, y); return; }
    const before = pointers.get(event.pointerId);
    const others = [...pointers].filter(([id]) => id !== event.pointerId).map(([, place]) => place);
    pointers.set(event.pointerId, [x, y]);
    if (others.length) {
      const anchor = chart.time(others[0][0]);
      const ratio = Math.abs(before[0] - others[0][0]) / Math.max(Math.abs(x - others[0][0]), 4);
      moved = true;
      chart.zoom(ratio, anchor);
    } else if (moved || Math.abs(x - before[0]) > 2) {
      moved = true;
      const shift = chart.time(before[0]) - chart.time(x);
      chart.setView(chart.view[0] + shift, chart.view[1] + shift);
    }
  });
  const release = (event) => {
    if (pointers.delete(event.pointerId) && !moved && event.type === "pointerup") select(chart.hit(...at(event)));
    if (!pointers.size) canvas.classList.remove("dragging");
  };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", () => { chart.hovered = -1; showTip(-1); chart.draw(); });
  canvas.addEventListener("dblclick", (event) => chart.zoom(0.5, chart.time(at(event)[0])));
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    chart.zoom(Math.exp(Math.max(-50, Math.min(50, event.deltaY)) / 150), chart.time(at(event)[0]));
  }, { passive: false });
}

function hover(x, y) {
  const found = chart.hit(x, y);
  if (found !== chart.hovered) { chart.hovered = found; chart.draw(); }
  showTip(found, x, y);
}

// Keys.

function step(delta) {
  const { rows, rank, lane } = chart.schedule;
  const i = chart.selected;
  if (i < 0 || lane[i] >= 0) { select(rows[i < 0 ? 0 : rank[i]].compute[0] ?? -1); return; }
  const list = rows[rank[i]].compute;
  select(list[Math.min(Math.max(list.indexOf(i) + delta, 0), list.length - 1)]);
}

function changeRank(delta) {
  const schedule = chart.schedule;
  const i = chart.selected;
  if (i < 0) { step(0); return; }
  const rank = Math.min(Math.max(schedule.rank[i] + delta, 0), schedule.ranks - 1);
  const list = schedule.rows[rank].compute;
  select(list[Math.max(0, schedule.at(list, schedule.start[i]))]);
}

function followDependency() {
  const { waits, end } = chart.schedule;
  if (chart.selected < 0 || !waits[chart.selected].length) return;
  select(waits[chart.selected].reduce((a, b) => (end[b] > end[a] ? b : a)));
}

const KEYS = {
  ArrowRight: () => step(1), ArrowLeft: () => step(-1), ArrowUp: () => changeRank(-1), ArrowDown: () => changeRank(1),
  "+": () => chart.zoom(0.6), "=": () => chart.zoom(0.6), "-": () => chart.zoom(1 / 0.6),
  0: () => chart.setView(0, chart.schedule.makespan), Enter: followDependency, Escape: () => select(-1),
};

function watchKeys() {
  element("chart").addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.shiftKey && event.key.startsWith("Arrow")) {
      const shift = ((chart.view[1] - chart.view[0]) / 5) * (event.key === "ArrowLeft" ? -1 : 1);
      chart.setView(chart.view[0] + shift, chart.view[1] + shift);
    } else if (event.key in KEYS) KEYS[event.key]();
    else return;
    event.preventDefault();
  });
}

// Tables: sort by a column, choose a schedule by its row.

function watchTables() {
  for (const row of document.querySelectorAll("tr[data-schedule]")) {
    row.querySelector("button").addEventListener("click", () => {
      choose(Number(row.dataset.schedule));
      element("timeline").scrollIntoView();
    });
  }
  for (const table of document.querySelectorAll("table.sortable")) {
    table.querySelectorAll("thead th").forEach((head, column) => {
      head.querySelector("button")?.addEventListener("click", () => sortBy(table, head, column));
    });
  }
}

function sortBy(table, head, column) {
  const ascending = head.getAttribute("aria-sort") !== "ascending";
  table.querySelectorAll("thead th").forEach((other) => other.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
  const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
  const rows = [...table.tBodies[0].rows].sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    const order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
    return ascending ? order : -order;
  });
  table.tBodies[0].append(...rows);
}

fillSelects();
watchPointer();
watchKeys();
watchTables();
element("zoom-in").addEventListener("click", () => chart.zoom(0.6));
element("zoom-out").addEventListener("click", () => chart.zoom(1 / 0.6));
element("zoom-fit").addEventListener("click", () => chart.setView(0, chart.schedule.makespan));
element("all").addEventListener("change", () => markRows(schedules.indexOf(chart.schedule)));
element("critical").addEventListener("change", (event) => { chart.showCritical = event.target.checked; chart.draw(); });
element("transfers").addEventListener("change", (event) => { chart.showTransfers = event.target.checked; chart.draw(); });
let width = 0;
new ResizeObserver(([entry]) => {
  // Drawing sets the height, which is a change of size too: only the width matters.
  if (entry.contentRect.width === width) return;
  width = entry.contentRect.width;
  requestAnimationFrame(() => chart.draw());
}).observe(element("chart").parentElement);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { chart.readColours(); chart.draw(); });
choose(data.chosen);
