// The rows of the timeline: which items each has, and in which lane each rollout is drawn.

// One row for each track, with its items sorted by start.
function prepareRows(found) {
  const kinds = found.tracks.map((name, track) => rowOf(found, name, track)).filter((row) => row.count);
  const rank = (row) => ["controller", "engine", "trainer", "scoring"].findIndex((word) => row.name.startsWith(word));
  kinds.sort((a, b) => rank(a) - rank(b) || a.name.localeCompare(b.name, "en", { numeric: true }));
  let top = 22;
  for (const row of kinds) {
    row.top = top;
    row.height = row.rollouts.length ? clamp(row.lanes * 4, 36, 128) : row.name === "controller" ? 38 : 28;
    top += row.height + 10;
  }
  timeline.rows = kinds;
  timeline.height = top + 2;
}

function rowOf(found, name, track) {
  const { rollouts, steps, publishes, pauses, spans } = found;
  const pick = (table, keep) => (table.start || []).map((_, i) => i).filter(keep).sort((a, b) =>
    table.start[a] - table.start[b]);
  const mine = pick(rollouts, (i) => rollouts.track[i] === track);
  const row = { name, rollouts: mine, start: Float64Array.from(mine, (i) => rollouts.start[i]), steps: pick(steps,
    (i) => steps.track[i] === track || name.startsWith("trainer rank")),
    publishes: name === "controller" ? pick(publishes, () => true) : [], pauses: pick(pauses,
      (i) => pauses.track[i] === track),
    spans: pick(spans, (i) => spans.track[i] === track), lane: new Uint16Array(mine.length), lanes: 0, longest: 0 };
  row.ends = Float64Array.from(mine, (i) => rollouts.end[i]).sort();
  assignLanes(row, rollouts);
  row.count = mine.length + row.steps.length + row.publishes.length + row.spans.length;
  const ends = [[publishes, row.publishes], [steps, row.steps], [spans, row.spans]].flatMap(([table, items]) =>
    items.map((i) => table.end[i]));
  row.last = ends.reduce((a, b) => Math.max(a, b), row.ends[row.ends.length - 1] || 0);
  return row;
}

// Each rollout gets the first lane that is free at its start.
function assignLanes(row, rollouts) {
  const free = [];
  row.rollouts.forEach((item, at) => {
    let lane = free.findIndex((end) => end <= rollouts.start[item]);
    if (lane < 0) lane = free.length;
    free[lane] = rollouts.end[item];
    row.lane[at] = lane;
    row.longest = Math.max(row.longest, rollouts.end[item] - rollouts.start[item]);
  });
  row.lanes = free.length;
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
