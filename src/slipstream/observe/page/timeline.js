// The timeline: a track for the controller, each engine, the trainer's ranks and scoring, drawn on a canvas.

const MAX_BARS = 4000; // rollouts drawn one by one; of more, their number at each time
const ITEM_COLOURS = { step: "good", publish: "publish", evaluation: "violet", checkpoint: "muted",
  score: "scoring", paused: "muted", fault: "bad", recovery: "good", start: "muted", dropped: "warning",
    warning: "warning", pause: "text" };
const CONTROLLER_LANES = { evaluation: 1, checkpoint: 2, dropped: 2, warning: 1 }; // below publishes
const BAD_FATES = ["stale", "failed", "filtered"];
const timeline = { view: null, rows: [], frame: 0, picked: null };

function drawTimeline() {
  const run = state.data.runs[state.run];
  const content = $("#timeline .content");
  if (!run.verdict) {
    fill($("#timeline .tools"), runPicker());
    fill(content, empty("events.jsonl is missing: the run recorded no events, so there is no timeline."));
    timeline.resize = null;
    return;
  }
  timeline.canvas = el("canvas", { tabindex: "0", role: "img",
    "aria-label": "Timeline of the run; arrow keys move, plus and minus zoom" });
  timeline.tip = el("div", { class: "tip", hidden: true });
  timeline.detail = el("div", { class: "life" },
    hint("Click a rollout to see its life from task to batch. Where there are too many to draw, a click zooms in."));
  const cut = `One of ${run.every} groups is drawn, to keep the file small; slipstream watch shows all.`;
  fill(content, run.every > 1 ? empty(cut) : null, el("div", { class: "canvas" }, timeline.canvas, timeline.tip),
    timelineLegend(), timeline.detail);
  prepareRows(run);
  timeline.extent = wholeRun();
  if (!timeline.view || timeline.shownRun !== run) timeline.view = [firstRollout(), timeline.extent[1]];
  timeline.shownRun = run;
  timeline.picked = null;
  timelineTools();
  listen(timeline.canvas);
  timeline.resize = resizeTimeline;
  resizeTimeline();
}

// The start of the window, over which the shares of each track are measured.
const firstRollout = () => Math.min(timeline.extent[1], ...timeline.rows.flatMap((row) => [...row.starts.slice(0, 1)]));
const showWholeRun = () => moveTo(timeline.extent);
const wholeRun = () => [0, timeline.rows.reduce((end, row) => Math.max(end, row.last), 0) * 1.005 || 1];

function timelineTools() {
  const tool = (text, title, onclick) => button(text, onclick, { "aria-label": title, title });
  fill($("#timeline .tools"), runPicker(), tool("−", "Zoom out", () => zoomTimeline(2)),
    tool("+", "Zoom in", () => zoomTimeline(0.5)), tool("Whole run", "Show the whole run", showWholeRun),
    el("span", { class: "hint" }, "Drag to move; ctrl + wheel or double-click to zoom."));
}

const timelineLegend = () => el("div", { class: "keys" }, [["sampling", "accent"], ["optimizer step", "good"],
  ["publish", "publish"], ["pause", "text"], ["fault", "bad"], ["evaluation", "violet"], ["scoring", "scoring"],
  ["checkpoint", "muted"], ["failed or stale, health warning", "warning"]]
  .map(([text, colour]) => el("span", {}, el("i", { style: { background: `var(--${colour})` } }), text)));

function resizeTimeline() {
  const { canvas } = timeline;
  const ratio = devicePixelRatio || 1;
  timeline.width = Math.max(200, canvas.parentNode.clientWidth); // a window may have no width for a moment
  timeline.left = timeline.width < 600 ? 66 : 96;
  canvas.width = timeline.width * ratio;
  canvas.height = timeline.height * ratio;
  canvas.style.height = `${timeline.height}px`;
  timeline.colours = Object.fromEntries(["accent", "good", "publish", "violet", "scoring", "muted", "warning", "bad",
    "grid", "text", "soft", "panel"].map((name) => [name, cssColour(name)]));
  paint();
}

const paint = () => { timeline.frame ||= requestAnimationFrame(() => { timeline.frame = 0; paintNow(); }); };
const secondsPerPixel = () => (timeline.view[1] - timeline.view[0]) / (timeline.width - timeline.left);
const xOf = (time) => timeline.left + (time - timeline.view[0]) / secondsPerPixel();
const timeAt = (x) => timeline.view[0] + (x - timeline.left) * secondsPerPixel();

function paintNow() {
  const context = timeline.canvas.getContext("2d");
  const { fractions } = state.data.runs[state.run];
  context.setTransform(devicePixelRatio || 1, 0, 0, devicePixelRatio || 1, 0, 0);
  context.clearRect(0, 0, timeline.width, timeline.height);
  context.font = "11px system-ui";
  paintScale(context);
  for (const row of timeline.rows) {
    context.save();
    context.beginPath();
    context.rect(timeline.left, row.top - 2, timeline.width, row.height + 4);
    context.clip();
    context.fillStyle = timeline.colours.soft;
    context.fillRect(timeline.left, row.top, timeline.width, row.height);
    paintRollouts(context, row);
    paintItems(context, row);
    context.restore();
    context.fillStyle = timeline.colours.text;
    context.fillText(row.name, 0, row.top + 13, timeline.left - 8);
    const shares = fractions[row.name];
    if (!shares || row.height < 28) continue;
    context.fillStyle = timeline.colours.muted;
    context.fillText(`busy ${Math.round(100 * shares.busy)}%`, 0, row.top + 27, timeline.left - 8);
  }
}

function paintScale(context) {
  const [from, to] = timeline.view;
  const rough = Math.min((to - from) / 2, 110 * secondsPerPixel());
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  for (let time = Math.ceil(from / step) * step; time <= to; time += step) {
    context.fillStyle = timeline.colours.grid;
    context.fillRect(Math.round(xOf(time)), 16, 1, timeline.height);
    context.fillStyle = timeline.colours.muted;
    context.fillText(clock(time, step, to), xOf(time) + 3, 11);
  }
}

function paintRollouts(context, row) {
  const [from, to] = timeline.view;
  const [first, last] = [below(row.starts, from - row.longest), below(row.starts, to)];
  row.drawn = last - first <= MAX_BARS;
  if (!row.drawn) return paintDensity(context, row);
  const { picked, colours } = timeline;
  const lane = row.height / row.lanes;
  for (const rollout of row.rollouts.slice(first, last)) {
    const bad = rollout.failure !== null || BAD_FATES.includes(rollout.group.fate);
    const x = xOf(rollout.start);
    context.fillStyle = rollout === picked ? colours.text : bad ? colours.warning : colours.accent;
    context.globalAlpha = picked && rollout.group === picked.group ? 1 : 0.62;
    context.fillRect(x, row.top + row.height - (rollout.lane + 1) * lane,
      Math.max(0.7, xOf(rollout.end) - x - 0.5), Math.max(0.8, lane - 0.8));
  }
  context.globalAlpha = 1;
  return undefined;
}

const inFlight = (row, time) => below(row.starts, time) - below(row.ends, time);

// The number of rollouts in flight at each pixel.
function paintDensity(context, row) {
  const bottom = row.top + row.height;
  context.fillStyle = timeline.colours.accent;
  context.globalAlpha = 0.55;
  context.beginPath();
  context.moveTo(timeline.left, bottom);
  for (let x = timeline.left; x < timeline.width; x += 1) {
    const time = timeAt(x + 0.5);
    const y = bottom - (inFlight(row, time) / row.lanes) * row.height;
    context.lineTo(x, y);
    context.lineTo(x + 1, y);
  }
  context.lineTo(timeline.width, bottom);
  context.fill();
  context.globalAlpha = 1;
}

function paintItems(context, row) {
  const [from, to] = timeline.view;
  const shown = Map.groupBy(row.items.filter((item) => item.end >= from && item.start <= to), (item) => item.kind);
  for (const [kind, items] of shown) {
    context.fillStyle = timeline.colours[ITEM_COLOURS[kind]];
    if (items.length > (timeline.width - timeline.left) / 3) paintCoverage(context, row, kind, items);
    else items.forEach((item) => paintItem(context, row, item));
  }
}

const laneOf = (row, kind) => (row.name === "controller" ? [row.top + 13 * (CONTROLLER_LANES[kind] || 0), 11]
  : [row.top, row.height]);

// Too many intervals to draw one by one: each pixel in the shade of the part of its time that they cover.
function paintCoverage(context, row, kind, items) {
  const [top, height] = laneOf(row, kind);
  const covered = new Float32Array(Math.ceil(timeline.width - timeline.left) + 1);
  for (const item of items) {
    const [from, to] = [item.start, item.end].map((time) => clamp(xOf(time) - timeline.left, 0, covered.length - 1));
    for (let x = Math.floor(from); x <= to; x += 1) covered[x] += Math.min(to, x + 1) - Math.max(from, x);
  }
  const level = (x) => Math.ceil(covered[x] * 8 - 1e-3) / 8;
  for (let x = 0, next = 0; x < covered.length; x = next) {
    while (next < covered.length && level(next) === level(x)) next += 1;
    context.globalAlpha = Math.min(1, level(x)) * 0.9;
    if (level(x)) context.fillRect(timeline.left + x, top, next - x, height);
  }
  context.globalAlpha = 1;
}

const labelOf = (item) => ({ step: `step ${item.step}`, publish: `v${item.version}` }[item.kind] || item.kind);

function paintItem(context, row, item) {
  const [x, [top, height]] = [xOf(item.start), laneOf(row, item.kind)];
  const width = Math.max(1.2, xOf(item.end) - x - 0.6);
  const instant = item.end === item.start;
  context.globalAlpha = item.kind === "pause" ? clamp(xOf(item.end) - x, 0.12, 0.9) : 0.9; // fainter below a pixel
  context.fillRect(instant ? x - 1.5 : x, top, instant ? 3 : width, height);
  context.globalAlpha = 1;
  const left = Math.max(x, timeline.left);
  const shown = Math.min(x + width, timeline.width) - left;
  if (shown < 50) return;
  const colour = context.fillStyle;
  context.fillStyle = timeline.colours.panel;
  context.fillText(labelOf(item), left + 4, top + Math.min(17, height - 1.5), shown - 8);
  context.fillStyle = colour;
}

function moveTo([from, to]) {
  const [first, last] = timeline.extent;
  const length = clamp(to - from, 0.005, last - first);
  const start = clamp(from, first, last - length);
  timeline.view = [start, start + length];
  paint();
}

function zoomTimeline(factor, x = (timeline.left + timeline.width) / 2) {
  const centre = timeAt(x);
  moveTo([centre - (centre - timeline.view[0]) * factor, centre + (timeline.view[1] - centre) * factor]);
}

const panTimeline = (pixels) => moveTo(timeline.view.map((time) => time + pixels * secondsPerPixel()));

function listen(canvas) {
  const held = new Map(); // positions of pointers that are down
  let moved = 0;
  canvas.addEventListener("pointerdown", (event) => {
    held.set(event.pointerId, event.offsetX);
    moved = 0;
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", (event) => {
    held.delete(event.pointerId);
    if (moved < 4) pickAt(event.offsetX, event.offsetY);
  });
  canvas.addEventListener("pointercancel", (event) => held.delete(event.pointerId));
  canvas.addEventListener("pointermove", (event) => {
    if (!held.has(event.pointerId)) return hover(event.offsetX, event.offsetY);
    const before = [...held.values()];
    const change = event.offsetX - held.get(event.pointerId);
    held.set(event.pointerId, event.offsetX);
    moved += Math.abs(change);
    if (held.size === 1) return panTimeline(-change);
    const [a, b] = [...held.values()];
    return zoomTimeline(Math.max(1, Math.abs(before[0] - before[1])) / Math.max(1, Math.abs(a - b)), (a + b) / 2);
  });
  canvas.addEventListener("pointerleave", () => { timeline.tip.hidden = true; });
  canvas.addEventListener("dblclick", (event) => zoomTimeline(0.25, event.offsetX));
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey && Math.abs(event.deltaX) <= Math.abs(event.deltaY)) return;
    event.preventDefault();
    if (event.ctrlKey || event.metaKey) zoomTimeline(Math.exp(event.deltaY / 200), event.offsetX);
    else panTimeline(event.deltaX);
  }, { passive: false });
  const keys = { ArrowLeft: () => panTimeline(-80), ArrowRight: () => panTimeline(80), "+": () => zoomTimeline(0.5),
    "=": () => zoomTimeline(0.5), "-": () => zoomTimeline(2), 0: showWholeRun };
  canvas.addEventListener("keydown", (event) => {
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
}

const rowAt = (y) => timeline.rows.find((row) => y >= row.top && y <= row.top + row.height);

function rolloutAt(row, x, y) {
  if (!row.rollouts.length || !row.drawn) return null;
  const lane = Math.floor((row.top + row.height - y) / (row.height / row.lanes));
  const time = timeAt(x);
  const near = row.rollouts.slice(below(row.starts, time - row.longest), below(row.starts, time));
  return near.findLast((rollout) => rollout.lane === lane && rollout.end >= time) || null;
}

function hover(x, y) {
  const row = rowAt(y);
  const text = row && x > timeline.left ? describeAt(row, x, y) : "";
  timeline.tip.hidden = !text;
  fill(timeline.tip, text);
  Object.assign(timeline.tip.style, { left: `${Math.min(x + 12, timeline.width - 240)}px`, top: `${y + 14}px` });
}

const took = (item) => seconds(item.end - item.start);

function describeAt(row, x, y) {
  const rollout = rolloutAt(row, x, y);
  if (rollout) return `${rollout.tokens} tokens in ${took(rollout)}, task ${rollout.group.task_id}`;
  const time = timeAt(x);
  const near = Math.abs(timeAt(x + 3) - time);
  const item = row.items.find(({ start, end, kind }) => {
    const [top, height] = laneOf(row, kind);
    return start - near <= time && end + near >= time && y >= top && y <= top + height + 2;
  });
  if (item) return describeItem(item);
  return row.rollouts.length ? `${seconds(time)}: ${inFlight(row, time)} rollouts in flight` : seconds(time);
}

function describeItem(item) {
  if (item.kind === "step") return `step ${item.step}: ${took(item)}, after a wait of ${seconds(item.wait_s || 0)}`;
  if (item.kind === "publish") return `publish of version ${item.version}: ${took(item)}`;
  if (item.kind === "pause") return `pause: ${took(item)}`;
  const text = item.what || item.text || ("step" in item ? `step ${item.step}` : took(item));
  return `${item.kind}: ${text} at ${seconds(item.start)}`;
}

function pickAt(x, y) {
  const row = rowAt(y);
  if (row && row.rollouts.length && !row.drawn) return zoomTimeline(0.1, x);
  const rollout = row ? rolloutAt(row, x, y) : null;
  if (!rollout) return undefined;
  timeline.picked = rollout;
  paint();
  return fill(timeline.detail, lifeOf(rollout));
}

// A rollout from task to batch, as a list of times.
function lifeOf(rollout) {
  const { group, start, end, oldest, newest } = rollout;
  const { step } = group;
  const after = seconds(Math.max(0, start - group.start));
  const reward = rollout.reward === null ? "" : `, reward ${number(rollout.reward)}`;
  const versions = oldest === newest ? `version ${oldest}` : `versions ${oldest} to ${newest}`;
  const rows = [[start, `${rollout.track} starts to sample it, ${after} after its group began`],
    [end, `sampled: ${number(rollout.tokens)} tokens in ${took(rollout)}, ${versions}${reward}`]];
  if (rollout.failure !== null) rows.push([end, `failed: ${rollout.failure}`]);
  rows.push([group.end, `its group is complete: ${group.fate}`]);
  if (step) {
    const [waited, lag] = [seconds(step.start - group.end), step.version - oldest];
    rows.push([step.start, `step ${step.step} trains on it, ${waited} later, at version ${step.version}: lag ${lag}`]);
    const publish = state.data.runs[state.run].timeline.items.find((item) => item.kind === "publish"
      && item.start >= step.end - 1e-3);
    if (publish) rows.push([publish.end, `version ${publish.version} is published with what was learned`]);
  }
  return el("div", {}, el("h3", {}, "Rollout of task ", group.task_id), el("table", { class: "life" },
    rows.map(([time, text]) => el("tr", {}, el("td", { class: "muted" }, clock(time, 0.001)), el("td", {}, text)))),
  step ? button("Show its text and its group", () => openGroup(step.step, group.visit_id)) : null);
}
