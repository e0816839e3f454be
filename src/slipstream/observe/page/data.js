// The page's data: columns of metrics and rollouts, and events. A live page appends what its server sends.

function merge(changes) {
  if (changes.whole) state.data = { runs: changes.runs.map(emptyRun), options: changes.options };
  changes.runs.forEach((more, i) => addRecords(state.data.runs[i], more));
}

const emptyRun = () => ({ metrics: {}, evaluations: {}, rollouts: {},
  timeline: { rollouts: [], groups: new Map(), items: [] } });

function addRecords(run, { metrics, evaluations, events, rollouts, ...described }) {
  Object.assign(run, described);
  appendColumns(run.metrics, metrics);
  appendColumns(run.evaluations, evaluations);
  rollouts.forEach((step) => appendColumns(run.rollouts, step));
  events.forEach((event) => addEvent(run.timeline, event));
}

// A column that one of both tables lacks is filled with null.
function appendColumns(known, more) {
  const rows = (table) => Object.values(table).reduce((most, column) => Math.max(most, column.length), 0);
  const [before, added] = [rows(known), rows(more)];
  for (const name of new Set([...Object.keys(known), ...Object.keys(more)])) {
    known[name] ||= Array(before).fill(null);
    for (const value of more[name] || Array(added).fill(null)) known[name].push(value);
  }
}

// Groups are found by visit; the newest of a visit, which is repeated after a drop. All other events are items.
function addEvent({ rollouts, groups, items }, event) {
  event.end ??= event.start;
  if (event.kind === "group") {
    groups.set(event.visit_id, event);
    for (const [engine, start, end, tokens, oldest, newest, reward, failure, number] of event.rollouts || []) {
      rollouts.push({ track: engine || "controller", start, end, tokens, oldest, newest, reward, failure, number,
        group: event });
    }
    return;
  }
  for (const group of (event.visit_ids || []).map((visit) => groups.get(visit)).filter(Boolean)) {
    if (event.kind === "step") group.step = event;
    else group.fate = "stale";
  }
  items.push(event);
  for (const [track, start, end] of event.pauses || []) items.push({ kind: "pause", track, start, end });
}
