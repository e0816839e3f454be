// A live page: asks its server for what is new each second, and draws again what can be seen, without losing its state.

const POLL_MS = 1000;
const SHARE = 0.04; // of the time, at most, in which one part of the page is drawn again
const TABLES = ["rollouts", "groups", "steps", "publishes", "pauses", "spans", "updates"];
const PARTS = [["summary", refreshSummary], ["curves", refreshCurves], ["timeline", refreshTimeline], ["rollouts", refreshRollouts]];
const live = { cursor: "", held: false, parts: PARTS.map(([id, draw]) => ({ id, draw, isStale: false, next: 0 })) };

async function follow() {
  const status = el("span", { class: "badge", role: "status" }, "live");
  $(".brand").after(status);
  for (const name of ["pointerdown", "pointerup", "pointercancel"]) {
    addEventListener(name, () => { live.held = name === "pointerdown"; }, true);
  }
  addEventListener("scroll", refresh, { passive: true });
  for (let more = live.more; ; ) {
    if (!more) await new Promise((done) => { setTimeout(done, POLL_MS); });
    if (document.hidden) await once(document, "visibilitychange");
    let changes = null;
    try {
      changes = await ask("data", { since: live.cursor });
    } catch (error) { // shown below, and asked again
      status.title = String(error);
    }
    more = changes && changes.more;
    status.textContent = changes ? "live" : "the server does not answer";
    if (changes && changes.cursor) merge(changes);
    refresh();
  }
}

const once = (target, name) => new Promise((done) => { target.addEventListener(name, done, { once: true }); });

// The answer of the server, whose URL may need a token.
async function ask(name, parameters) {
  const query = new URLSearchParams(location.search);
  for (const [key, value] of Object.entries(parameters)) query.set(key, value);
  const answer = await fetch(`api/${name}?${query}`);
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

function merge(changes) {
  Object.assign(live, { cursor: changes.cursor, more: changes.more });
  if (changes.whole) {
    const isFirst = !state.data;
    state.data = { runs: changes.runs.map(emptyRun), options: changes.options };
    changes.runs.forEach((more, i) => mergeRun(state.data.runs[i], more));
    source.texts.clear();
    if (!isFirst) drawPage();
  } else {
    changes.runs.forEach((more, i) => mergeRun(state.data.runs[i], more));
    for (const part of live.parts) part.isStale = true;
  }
}

const emptyRun = () => ({ metrics: {}, evaluations: {},
  rollouts: { columns: {}, metrics: {}, tasks: [], roles: [], reasons: [], every: 1 },
  events: { tracks: [], reasons: [], left_out: [0, 0], ...Object.fromEntries(TABLES.map((name) => [name, {}])) } });

function mergeRun(run, more) {
  const { timeline: added, ...tables } = more.append;
  append(run, tables);
  append(run.events, added || {});
  const { timeline: measured, ...described } = more.set;
  Object.assign(run, described);
  Object.assign(run.events, measured);
  const { updates } = (added || {});
  for (let i = 0; updates && i < updates.group.length; i += 1) {
    run.events.groups[updates.column[i]][updates.group[i]] = updates.value[i];
  }
  run.timeline = run.events.tracks.length ? run.events : null;
}

// Append the lists in `more` to those of the same name.
function append(known, more) {
  for (const [name, value] of Object.entries(more)) {
    if (!Array.isArray(value)) append((known[name] ||= {}), value);
    else if (known[name]) for (const item of value) known[name].push(item);
    else known[name] = value;
  }
}

// Draw the parts that are stale and near the window, unless the pointer holds something.
function refresh() {
  for (const part of live.parts) {
    const began = performance.now();
    if (!part.isStale || live.held || began < part.next || !isNear($(`#${part.id}`))) continue;
    part.isStale = false;
    part.draw();
    const ended = performance.now();
    part.next = ended + (ended - began) / SHARE;
  }
}

function isNear(node) {
  const { top, bottom } = node.getBoundingClientRect();
  return bottom > -200 && top < innerHeight + 200;
}

function refreshSummary() {
  const isOpen = $("#summary .samples")?.open;
  drawSummary();
  if (isOpen) $("#summary .samples").open = true;
}

// Charts near the window get their new data; the others are drawn when they come near.
function refreshCurves() {
  const { names } = metricNames(state.data.runs);
  const shown = [...document.querySelectorAll("#curves .chart")].map((node) => node.dataset.metric);
  if (new Set([...names, ...shown]).size !== shown.length) return drawCurves();
  for (const chart of [...charts.all]) {
    const node = chart.root.parentNode;
    if (isNear(node)) {
      chart.setData(chartData(chart.metric), !charts.range);
      if (charts.range) chart.redraw();
      readout(chart, node);
    } else {
      chart.destroy();
      charts.all.splice(charts.all.indexOf(chart), 1);
      charts.observer.observe(node);
    }
  }
  return undefined;
}

// A view of the whole run, or of its end, moves along with it.
function refreshTimeline() {
  const run = state.data.runs[state.run];
  if (!timeline.resize || timeline.shownRun !== run) return drawTimeline();
  const [[from, to], last] = [timeline.view, timeline.extent[1]];
  prepareRows(run.timeline);
  timeline.extent = wholeRun();
  const grown = timeline.extent[1] - last;
  if (from <= 0 && to >= last) timeline.view = [...timeline.extent];
  else if (to >= last * 0.999) timeline.view = [from + grown, to + grown];
  return resizeTimeline();
}

function refreshRollouts() {
  const run = state.data.runs[state.run];
  if (!$("#rollouts .list")) return drawRollouts();
  extendSelect("Ended by", run.rollouts.reasons.map((reason, i) => [i, reason]));
  extendSelect("Metric", Object.keys(run.rollouts.metrics).map((name) => [name, name]));
  $("#rollouts .content").firstChild.replaceWith(leftOut(run));
  const { scrollLeft: left, scrollTop: top } = $("#rollouts .list .scroll");
  const focused = document.activeElement.closest(".list tr");
  const rollout = focused && rollouts.matches[focused.sectionRowIndex];
  applyFilter();
  $("#rollouts .list .scroll").scrollTo({ left, top });
  if (focused) $("#rollouts .list tbody").rows[rollouts.matches.indexOf(rollout)]?.focus({ preventScroll: true });
  return undefined;
}

// Add the options that a list lacks, behind its first one.
function extendSelect(label, options) {
  const labels = [...document.querySelectorAll("#rollouts .tools label")];
  const list = labels.find((node) => node.firstChild.textContent === label)?.querySelector("select");
  for (const [key, text] of list ? options.slice(list.options.length - 1) : []) list.append(el("option", { value: key }, text));
}
