// Curves of all runs, one chart for each metric, in groups by the section of its name.

const FIRST = ["reward/mean", "eval/score", "train/loss", "policy/entropy", "policy/mismatch_kl", "train/grad_norm",
  "completions/mean_length", "lag/mean"];
const ORDER = ["reward", "environments", "policies", "env", "policy", "lag", "completions", "train", "eval", "time", "gen", "buffer", "rollout",
  "sync", "engines", "scoring", "experts"];
const AXES = { step: "step", time: "time/wall_s", tokens: "train/total_tokens" };
const TOTALS = /\/total_tokens$|\/(wall|window|busy)_s$|^rollout\/(generated|trained)$|^engines\/(tokens|busy_s)\//;
const UNSMOOTHED = /^(eval|engines|buffer)\/|^lag\/max$|in_flight$|queued$/; // evaluations, and gauges of counts
const charts = { all: [], range: null, filter: "", observer: null };

function drawCurves() {
  const runs = state.data.runs;
  charts.all.forEach((chart) => chart.destroy());
  charts.all = [];
  const lines = runs.flatMap((run) => run.warnings).map(({ rule, step }) => `${rule} (step ${number(step)})`);
  const { names, constant } = metricNames(runs);
  const groups = Map.groupBy(names, (name) => (TOTALS.test(name) ? "totals"
    : FIRST.includes(name) ? "overview" : name.split("/")[0]));
  const totals = groups.get("totals");
  groups.delete("totals");
  const content = fill($("#curves .content"),
    lines.length ? hint(`Dashed lines: ${lines.join(", ")}`) : null,
    [...charts.same.values()].some((same) => same.length) ? hint("* other metrics, named in its tooltip, have the same values.") : null,
    names.length ? null : empty("No step is recorded yet: there are no curves."),
    el("div", { class: "groups" }, [...groups].map(([section, members]) => chartGroup(section, members, true))),
    totals ? chartGroup("totals", totals, Boolean(charts.filter)) : null,
    constant.length && !charts.filter ? constantTable(constant) : null);
  charts.observer = new IntersectionObserver(drawIfVisible, { rootMargin: "300px" });
  content.querySelectorAll(".chart").forEach((node) => charts.observer.observe(node));
}

const chartGroup = (section, members, open) => el("details", { open, 
  class: `group n${section === "overview" ? 4 : Math.min(4, members.length)}` },
  el("summary", {}, section, muted(` ${members.length}`)),
  el("div", { class: "grid" }, members.map(chartPanel)));

function curveTools() {
  const smoothBy = (value) => {
    state.smoothing = +value;
    for (const chart of charts.all) {
      chart.setData(chartData(chart.metric), false);
      chart.redraw();
    }
  };
  fill($("#curves .tools"),
    select("x axis", [["step", "Step"], ["time", "Time (s)"], ["tokens", "Tokens"]], state.axis,
      (value) => { state.axis = value; charts.range = null; drawCurves(); }),
    field("Smoothing", { type: "range", min: 0, max: 0.99, step: 0.01, value: state.smoothing, id: "smoothing" }, smoothBy),
    field("Find", { type: "search", placeholder: "reward, kl, …" }, (value) => { charts.filter = value; drawCurves(); }),
    button("Reset zoom", () => zoomTo(null)), el("span", { class: "hint" }, "Drag to zoom; double-click to reset."));
}

// Names of the metrics of all runs: those that vary, each grouped with metrics of equal values, and constant ones.
function metricNames(runs) {
  const ranges = new Map();
  for (const [name, column] of runs.flatMap((run) => Object.entries({ ...run.evaluations, ...run.metrics }))) {
    if (!name.includes("/") || !name.includes(charts.filter)) continue;
    const range = ranges.get(name) || ranges.set(name, { low: Infinity, high: -Infinity }).get(name);
    for (const value of column.filter((each) => each !== null)) {
      range.low = Math.min(range.low, value);
      range.high = Math.max(range.high, value);
    }
  }
  const rank = (name) => (FIRST.includes(name) ? FIRST.indexOf(name) - FIRST.length
    : (ORDER.indexOf(name.split("/")[0]) + 100) % 100);
  const names = [...ranges.keys()].sort((a, b) => rank(a) - rank(b));
  const varies = (name) => ranges.get(name).high > ranges.get(name).low;
  const alike = Map.groupBy(names.filter((name) => varies(name) || name === "eval/score"), (name) =>
    JSON.stringify(runs.map((run) => run.evaluations[name] || run.metrics[name])));
  charts.same = new Map([...alike.values()].map(([first, ...others]) => [first, others]));
  return { names: [...charts.same.keys()], constant: names.filter((name) => !varies(name))
    .map((name) => [name, ranges.get(name).low]) };
}

const constantTable = (constant) => el("details", { class: "group" },
  el("summary", {}, "without change", muted(` ${constant.length}`)),
  el("div", { class: "constants" }, constant.map(([name, value]) =>
    el("div", {}, el("span", {}, name), el("b", {}, `${number(value)} ${unit(name)}`)))));

function chartPanel(name) {
  const label = /(_(ms|s|gb)|tokens|tflops)$/.test(name) ? "" : unit(name); // names may end with their unit
  const same = charts.same.get(name);
  const title = same.length ? `${name}; the same values: ${same.join(", ")}` : name;
  return el("figure", { class: "chart", "data-metric": name },
    el("figcaption", {}, el("span", { class: "name", title }, breakable(name), same.length ? " *" : ""),
      label ? muted(label) : null, el("span", { class: "readout" })));
}

// The name of a metric, which may continue on the next line after "/" and "_".
const breakable = (name) => name.split(/(?<=[/_])/).flatMap((part) => [part, el("wbr")]);

function drawIfVisible(entries) {
  for (const { target, isIntersecting } of entries) {
    if (!isIntersecting) continue;
    charts.observer.unobserve(target);
    drawChart(target, target.dataset.metric);
  }
}

function column(run, name) {
  const isEvaluation = name.startsWith("eval/");
  const table = isEvaluation ? run.evaluations : run.metrics;
  if (!table[name]) return [[], []];
  let x = table[AXES[state.axis]];
  if (isEvaluation && state.axis !== "step") x = table.step.map((step) => atStep(run, step));
  const kept = (x || []).map((_, i) => i).filter((i) => x[i] !== null && table[name][i] !== null);
  return [kept.map((i) => x[i]), kept.map((i) => table[name][i])];
}

// The position of a step on the chosen axis.
function atStep(run, step) {
  if (state.axis === "step" || !run.metrics.step) return step;
  const index = run.metrics.step.findLastIndex((known) => known <= step);
  return index < 0 ? 0 : (run.metrics[AXES[state.axis]] || [])[index];
}

// Exponential moving average that starts at the first value.
function smooth(values, weight) {
  let sum = 0;
  let total = 0;
  return values.map((value) => {
    sum = sum * weight + value * (1 - weight);
    total = total * weight + 1 - weight;
    return sum / total;
  });
}

function chartData(name) {
  const weight = UNSMOOTHED.test(name) ? 0 : state.smoothing;
  const tables = state.data.runs.flatMap((run) => {
    const [x, y] = column(run, name);
    return [[x, y], [x, smooth(y, weight)]];
  });
  return tables.some(([x]) => x.length) ? uPlot.join(tables) : [[], ...tables.map(() => [])];
}

// uPlot draws a constant 0 from 0 to 100, and has no ticks for values that differ by rounding only: both are in the middle.
const yRange = (chart, low, high) => (high - low > 1e-5 * Math.max(Math.abs(low), Math.abs(high)) ? uPlot.rangeNum(low, high, 0.1, true)
  : [low - (Math.abs(low) || 1), low + (Math.abs(low) || 1)]);

function drawChart(node, name) {
  const grid = { stroke: cssColour("grid"), width: 1 };
  const axis = { stroke: cssColour("muted"), grid, ticks: { show: false }, font: "11px system-ui" };
  const few = name.startsWith("eval/");
  const series = state.data.runs.flatMap((run, index) => {
    const common = { spanGaps: true, show: !state.hidden.has(index), stroke: cssColour(runColour(index)) };
    return [{ ...common, alpha: 0.25, width: 1, points: { show: false } },
      { ...common, width: 1.6, points: { show: few, size: 5 } }];
  });
  const chart = new uPlot({
    width: innerWidthOf(node), height: 168, legend: { show: false }, padding: [8, 16, 0, 0],
    scales: { x: { time: false }, y: { range: yRange } }, series: [{}, ...series],
    axes: [{ ...axis, size: 26, space: 60, values: tickLabels }, { ...axis, size: 48, space: 28, values: tickLabels }],
    cursor: { sync: { key: "curves", setSeries: false }, drag: { setScale: false, x: true, y: false },
      points: { size: 6 }, bind: { dblclick: () => () => zoomTo(null) } },
    hooks: { setCursor: [(u) => readout(u, node)], draw: [drawWarnings],
      setSelect: [(u) => { if (u.select.width > 4) zoomTo([u.posToVal(u.select.left, "x"),
        u.posToVal(u.select.left + u.select.width, "x")]); }] },
  }, chartData(name), node);
  chart.metric = name;
  charts.all.push(chart);
  if (charts.range) chart.setScale("x", { min: charts.range[0], max: charts.range[1] });
  readout(chart, node);
}

const short = (value) => (Math.abs(value) >= 1e6 ? `${+(value / 1e6).toPrecision(3)}M` : Math.abs(value) >= 1e4
  ? `${+(value / 1e3).toPrecision(3)}k` : number(value, 3));

// Labels with as many digits as keep them distinct.
function tickLabels(_, ticks) {
  const digits = [3, 4, 5, 6, 7].find((count) => new Set(ticks.map((value) => number(value, count))).size === ticks.length);
  return digits === 3 || !digits ? ticks.map(short) : ticks.map((value) => number(value, digits));
}

function zoomTo(range) {
  charts.range = range;
  for (const chart of charts.all) {
    chart.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    const x = chart.data[0];
    const [min, max] = range || [x[0], x[x.length - 1]];
    if (x.length) chart.setScale("x", { min, max });
  }
}

// Values at the cursor, or else the last ones, in the caption.
function readout(chart, node) {
  const at = chart.cursor.idx ?? null;
  const x = at === null ? null : chart.data[0][at];
  const parts = state.data.runs.map((run, index) => {
    const values = chart.data[2 * index + 1];
    const known = at === null ? values.findLast(Number.isFinite) : values[at];
    return state.hidden.has(index) ? null : el("b", { style: { color: `var(--${runColour(index)})` } }, number(known));
  });
  const near = state.data.runs.flatMap((run) => run.warnings).filter(({ step }) => state.axis === "step" && step === x);
  fill(node.querySelector(".readout"), at === null ? null : muted(`${state.axis} ${number(x)}`),
    near.map(({ rule }) => el("span", { class: "unusual" }, rule)), parts);
}

// A dashed line at each step with a warning.
function drawWarnings(chart) {
  const { ctx, bbox } = chart;
  ctx.save();
  ctx.strokeStyle = cssColour("warning");
  ctx.setLineDash([4, 4]);
  state.data.runs.forEach((run, index) => {
    if (state.hidden.has(index)) return;
    for (const warning of run.warnings) {
      const x = chart.valToPos(atStep(run, warning.step), "x", true);
      if (!(x >= bbox.left && x <= bbox.left + bbox.width)) continue;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
  });
  ctx.restore();
}

// Zoom all curves to a tenth of the run around a step.
function showStep(run, step) {
  const x = (run.metrics[AXES[state.axis]] || [0]).filter((value) => value !== null);
  const half = (x[x.length - 1] - x[0]) / 20 || 1;
  zoomTo([atStep(run, step) - half, atStep(run, step) + half]);
  $("#curves").scrollIntoView();
}

const innerWidthOf = (node) => node.clientWidth - 20; // without its padding

function resizeCharts() {
  for (const chart of charts.all) {
    const width = innerWidthOf(chart.root.parentNode);
    if (width > 0) chart.setSize({ width, height: 168 });
  }
}
