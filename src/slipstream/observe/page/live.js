// A live page: asks its server for what is new each second, and draws again what can be seen, without losing its state.

const POLL_MS = 1000;
const SHARE = 0.04; // of the time, at most, in which one part of the page is drawn again
const PARTS = { summary: refreshSummary, curves: refreshCurves, timeline: refreshTimeline, rollouts: refreshRollouts };
const live = { held: false,
  parts: Object.entries(PARTS).map(([id, draw]) => ({ id, draw, isStale: false, next: 0 })) };

// Ask for what came after the answer `last`, from now on.
async function follow(last) {
  const status = el("span", { class: "badge", role: "status" }, "live");
  $(".brand").after(status);
  for (const name of ["pointerdown", "pointerup", "pointercancel"]) {
    addEventListener(name, () => { live.held = name === "pointerdown"; }, true);
  }
  addEventListener("scroll", refresh, { passive: true });
  for (live.more = last.more; ;) {
    if (!live.more) await new Promise((done) => { setTimeout(done, POLL_MS); });
    if (document.hidden) await once(document, "visibilitychange");
    const changes = await ask("data", { since: last.cursor }).catch((error) => { status.title = String(error); });
    status.textContent = changes ? "live" : "the server does not answer";
    live.more = changes?.more;
    if (changes?.cursor) {
      last = changes;
      update(changes);
    }
    refresh();
  }
}

function update(changes) {
  merge(changes);
  if (changes.whole) {
    source.texts.clear();
    drawPage();
  } else for (const part of live.parts) part.isStale = true;
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
  prepareRows(run);
  timeline.extent = wholeRun();
  const [end, start] = [timeline.extent[1], firstRollout()];
  if (to >= last * 0.999) timeline.view = [from <= start ? Math.min(from, start) : from + end - last, to + end - last];
  return resizeTimeline();
}

function refreshRollouts() {
  const run = state.data.runs[state.run];
  if (!$("#rollouts .list")) return drawRollouts();
  extendSelect("Ended by", endings(run));
  extendSelect("Metric", environmentMetrics(run));
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
function extendSelect(label, values) {
  const labels = [...document.querySelectorAll("#rollouts .tools label")];
  const list = labels.find((node) => node.firstChild.textContent === label)?.querySelector("select");
  for (const value of list ? values.slice(list.options.length - 1) : []) list.append(el("option", { value }, value));
}
