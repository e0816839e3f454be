// The rows of the timeline: which items each has, and in which lane each rollout is drawn.

const TRACKS = ["controller", "engine", "trainer", "scoring"];
const byStart = (a, b) => a.start - b.start;

// One row for each track, with its items sorted by start. The ranks of the trainer take each step together.
function prepareRows(run) {
  const { rollouts, items } = run.timeline;
  const ranks = Object.keys(run.fractions).filter((name) => name.startsWith("trainer rank"));
  const tracks = new Map();
  const trackOf = (name) => tracks.get(name) || tracks.set(name, { name, rollouts: [], items: [] }).get(name);
  for (const rollout of rollouts) trackOf(rollout.track).rollouts.push(rollout);
  for (const item of items) {
    for (const name of item.kind === "step" ? [item.track, ...ranks] : [item.track]) trackOf(name).items.push(item);
  }
  const rank = (row) => TRACKS.findIndex((word) => row.name.startsWith(word));
  timeline.rows = [...tracks.values()].sort((a, b) => rank(a) - rank(b)
    || a.name.localeCompare(b.name, "en", { numeric: true }));
  let top = 22;
  for (const row of timeline.rows) {
    prepareRow(row);
    row.top = top;
    row.height = row.rollouts.length ? clamp(row.lanes * 4, 36, 128) : row.name === "controller" ? 38 : 28;
    top += row.height + 10;
  }
  timeline.height = top + 2;
}

// Each rollout gets the first lane that is free at its start.
function prepareRow(row) {
  row.items.sort(byStart);
  row.rollouts.sort(byStart);
  row.starts = Float64Array.from(row.rollouts, (rollout) => rollout.start);
  row.ends = Float64Array.from(row.rollouts, (rollout) => rollout.end).sort();
  row.longest = 0;
  const free = [];
  for (const rollout of row.rollouts) {
    const lane = free.findIndex((end) => end <= rollout.start);
    rollout.lane = lane < 0 ? free.length : lane;
    free[rollout.lane] = rollout.end;
    row.longest = Math.max(row.longest, rollout.end - rollout.start);
  }
  row.lanes = free.length;
  row.last = row.items.reduce((end, item) => Math.max(end, item.end), row.ends[row.ends.length - 1] || 0);
}

// The number of values below x in ascending values.
function below(values, x) {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < x) low = middle + 1; else high = middle;
  }
  return low;
}
