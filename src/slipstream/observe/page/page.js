// The summary, the configuration, and the start of the page.

async function main() {
  $("#theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    drawColours();
  });
  const data = source.live ? await ask("data", {}) : await unpack($("#data").textContent);
  merge(data);
  drawPage();
  addEventListener("resize", () => {
    resizeCharts();
    timeline.resize?.();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawColours);
  document.documentElement.dataset.ready = Math.round(performance.now());
  if (source.live) follow(data);
}

function drawPage() {
  drawSummary();
  curveTools();
  drawCurves();
  drawTimeline();
  drawRollouts();
  drawConfiguration();
}

// What is drawn on canvases.
function drawColours() {
  drawCurves();
  timeline.resize?.();
}

function drawSummary() {
  const { runs } = state.data;
  const title = several() ? `${runs.length} runs` : runs[0].name;
  fill($("#summary"),
    el("div", { class: "title" }, el("h1", {}, title), several() ? null : [badge(runs[0]), warningBadge(runs[0])]),
    runs.map((run) => run.problems.map((text) => el("p", { class: "problem" }, ofRun(run) + text))),
    several() ? [runLegend(), factTable(runs)] : factCards(runs[0]), findings(runs), several() ? null : samples(runs[0]));
}

const STATES = { complete: "complete", running: "running", stopped: "stopped early", dead: "ended without a summary" };
const badge = (run) => el("span", { class: `badge ${run.state}` }, STATES[run.state] || run.state);

const warningBadge = ({ warnings }) => {
  const { size } = new Set(warnings.map(({ rule }) => rule));
  return size ? el("a", { class: "badge warned", href: "#health" }, `${size} health warning${size > 1 ? "s" : ""}`) : null;
};

// Names of the runs with their colours; a click hides a run in the curves.
function runLegend() {
  return el("div", { class: "legend", role: "group", "aria-label": "Runs" }, state.data.runs.map((run, index) =>
    button([el("i", { style: { background: `var(--${runColour(index)})` } }), run.name, badge(run)],
      () => toggleRun(index), { "aria-pressed": String(!state.hidden.has(index)) })));
}

function toggleRun(index) {
  if (!state.hidden.delete(index)) state.hidden.add(index);
  drawSummary();
  drawCurves();
}

function interval(values, signed) {
  if (!values) return ["–"];
  const sign = (value) => `${signed && value > 0 ? "+" : ""}${value.toFixed(3)}`;
  return [sign(values[0]), values[1] === null ? null : muted(` [${sign(values[1])}, ${sign(values[2])}]`)];
}

const factCards = (run) => el("div", { class: "cards" }, scoreCard(run),
  run.facts.map(([label, value, note]) => card(label, value, note)));

const card = (label, value, note) => el("div", { class: "card" }, el("div", { class: "label" }, label),
  el("div", { class: "value" }, value), el("div", { class: "note" }, note));

// Before and after as dots with their 95% intervals on one scale.
function scoreCard(run) {
  const { score } = run;
  if (!score) return card("Held-out score", "–", "no evaluation is recorded: set evaluation.every");
  const value = [score.before[0].toFixed(3), score.after ? ` → ${score.after[0].toFixed(3)}` : ""];
  const change = score.difference ? el("div", { class: `change ${verdict(score.difference)}` },
    interval(score.difference, true)) : null;
  const note = `95% interval, ${score.method}${score.tasks ? `, ${number(score.tasks)} tasks` : ""}; steps ${score.step.join(" and ")}`;
  return el("div", { class: "card score" }, el("div", { class: "label" }, "Held-out score"), el("div", { class: "row" },
    el("div", { class: "value" }, value), change), whiskers(score), el("div", { class: "note" }, note));
}

function verdict(difference) {
  if (difference[1] === null || (difference[1] <= 0 && difference[2] >= 0)) return "unclear";
  return difference[0] > 0 ? "better" : "worse";
}

function whiskers(score) {
  const rows = [["before", score.before], ["after", score.after]].filter(([, values]) => values && values[1] !== null);
  const low = Math.min(...rows.map(([, values]) => values[1]));
  const high = Math.max(...rows.map(([, values]) => values[2]));
  const percent = (length) => `${(100 * length) / (high - low || 1)}%`;
  return el("div", { class: "whiskers" }, rows.map(([name, [value, from, to]]) => el("div", { class: name },
    el("span", {}, name), el("div", { class: "scale" },
      el("i", { class: "range", style: { left: percent(from - low), width: percent(to - from) } }),
      el("i", { class: "dot", style: { left: percent(value - low) } })),
    el("span", {}, `${from.toFixed(3)} – ${to.toFixed(3)}`))));
}

function factTable(runs) {
  const row = (label, cell) => el("tr", {}, el("th", { scope: "row" }, label),
    runs.map((run) => el("td", {}, cell(run))));
  const score = ({ score: found }) => (found
    ? [found.before[0].toFixed(3), " → ", interval(found.after || found.before)] : "–");
  const methods = [...new Set(runs.map((run) => run.score?.method).filter(Boolean))].join("; ");
  return el("div", { class: "scroll" }, el("table", { class: "facts" },
    el("caption", {}, methods ? `Intervals: 95%, ${methods}` : ""),
    el("thead", {}, el("tr", {}, el("td", {}), runs.map((run, i) => el("th", { scope: "col" },
      el("i", { class: "key", style: { background: `var(--${runColour(i)})` } }), run.name)))),
    el("tbody", {}, row("Held-out score", score), row("Change", (run) => interval(run.score?.difference, true)),
      runs[0].facts.map(([label], i) => row(label, (run) => [run.facts[i][1],
        el("div", { class: "note" }, run.facts[i][2])])))));
}

// Health warnings, and what failed.
function findings(runs) {
  const byRule = (run, follows) => [...Map.groupBy(run.warnings, (warning) => warning.rule).values()]
    .filter(([warning]) => Boolean(warning.follows) === follows).map((same) => warningItem(run, same));
  const fault = (run, text) => el("li", { class: "fault" }, el("div", {}, el("b", {}, ofRun(run), text)));
  const items = runs.flatMap((run) => [...byRule(run, false), ...run.faults.map((text) => fault(run, text))]);
  const consequences = runs.flatMap((run) => byRule(run, true));
  return el("div", { class: "health", id: "health" }, el("h2", {}, "Health"),
    items.length ? el("ul", {}, items) : el("p", { class: "fine" }, "No health warning and no fault is recorded."),
    consequences.length ? el("ul", { class: "consequences" }, consequences) : null,
    runs.filter((run) => run.verdict).map((run) => el("p",
      { class: run.warnings.length ? "note" : "sentence" }, ofRun(run), run.verdict)));
}

// The warnings of one rule: the first one's text, and a link to the step of each.
function warningItem(run, same) {
  const [warning] = same;
  const steps = same.filter(({ step }) => Number.isFinite(step)).slice(0, 12).map(({ step }, i) =>
    button(`${i ? "again at" : "first seen at"} step ${number(step)}`, () => showStep(run, step), { class: "link" }));
  return el("li", { class: "warning" }, el("div", {}, el("b", {}, ofRun(run), warning.rule),
    warning.follows ? ` (probably follows from ${warning.follows})` : "", " ", warning.text,
    warning.detail.map((text) => el("div", {}, text)),
    warning.follows ? null : el("div", {}, el("b", {}, "What to do: "), remedyOf(run, warning))),
  el("div", { class: "steps" }, steps));
}

// The command that prints rollouts is a link to those of this page.
function remedyOf(run, { remedy }) {
  const [before, ...after] = remedy.split("slipstream rollouts RUN");
  return [before, after.map((text) => [button("show", () => showBest(run), { class: "link" }), text])];
}

function samples({ samples: found }) {
  if (!found?.before?.length) return null;
  const side = (when, sample) => el("div", {},
    muted(`${when}: ${"failed" in sample ? "failed" : `reward ${number(sample.reward)}`}`),
    el("pre", {}, sample.failed || sample.completion || "(nothing)"));
  const title = `The same held-out tasks before and after: ${found.better} better, ${found.worse} worse of ${found.compared}`;
  return el("details", { class: "samples" }, el("summary", {}, title), found.before.map((old, i) =>
    el("div", { class: "pair" }, el("pre", { class: "prompt" }, old.prompt),
      side("before", old), side("after", found.after[i]))));
}

function drawConfiguration() {
  const { runs, options } = state.data;
  const shown = { find: "", differing: several() };
  const known = new Map(options.map((option) => [option.name, option]));
  const names = new Set([...known.keys(), ...runs.flatMap((run) => Object.keys(run.config))]);
  const rows = [...names].filter((name) => runs.some((run) => name in run.config))
    .map((name) => configRow(name, known.get(name), runs));
  rows.sort((a, b) => b.differs - a.differs || b.changed - a.changed);
  const draw = () => fill($("#configuration .content"), configTable(rows.filter((row) =>
    row.text.includes(shown.find.toLowerCase()) && (row.differs || !shown.differing)), runs));
  const only = el("input", { type: "checkbox", checked: shown.differing,
    onchange: (event) => { shown.differing = event.target.checked; draw(); } });
  fill($("#configuration .tools"),
    field("Find", { type: "search", placeholder: "option, value or meaning" }, (value) => { shown.find = value; draw(); }),
    several() ? el("label", { class: "check" }, only, el("span", {}, "only what differs")) : null,
    el("span", { class: "hint" }, "Options that are not at their default come first."));
  draw();
}

function configRow(name, option, runs) {
  const values = runs.map((run) => (name in run.config ? JSON.stringify(run.config[name]) : "–"));
  const standard = option && "default" in option ? JSON.stringify(option.default) : "";
  const same = (text) => text === standard || (text !== "–" && standard !== ""
    && JSON.parse(text) === JSON.parse(standard));
  const description = option?.description || "";
  return { name, values, standard, description, changed: values.some((text) => !same(text)),
    differs: new Set(values).size > 1, text: [name, ...values, description].join(" ").toLowerCase() };
}

function configTable(rows, runs) {
  if (!rows.length) return empty(runs.some((run) => Object.keys(run.config).length) ? "No option matches."
    : "config.toml is missing or damaged.");
  const head = ["Option", ...(several() ? runs.map((run) => run.name) : ["Value"]), "Default", "Meaning"];
  return el("div", { class: "scroll" }, el("table", { class: "config" }, el("thead", {},
    el("tr", {}, head.map((text) => el("th", { scope: "col" }, text)))),
    el("tbody", {}, rows.map((row) => el("tr", { class: row.differs ? "differs" : row.changed ? "changed" : "" },
      el("th", { scope: "row" }, row.name),
      row.values.map((value) => el("td", {}, value)),
      el("td", { class: "muted" }, row.standard), el("td", { class: "muted" }, row.description))))));
}

main();
