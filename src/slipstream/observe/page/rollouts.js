// Rollouts: filters and a histogram over all of them, a list, and the members of a group side by side.

const MAX_LISTED = 200;
const MAX_SPANS = 3000; // tokens shown of a turn before "show all"
const rollouts = { filter: {}, colour: "logprob", order: "step", shown: MAX_LISTED, matches: [] };

function drawRollouts() {
  const run = state.data.runs[state.run];
  const content = $("#rollouts .content");
  rollouts.filter = {};
  rollouts.search = null;
  if (!run.rollouts.step) {
    fill($("#rollouts .tools"), runPicker());
    fill(content, empty("No rollouts are recorded: rollouts/ is empty or can't be read."));
    return;
  }
  fill(content, leftOut(run), ["histogram", "group-view", "list"].map((name) => el("div", { class: name })));
  rolloutTools(run);
  applyFilter();
}

function leftOut(run) {
  const { step } = run.rollouts;
  const steps = new Set(step).size;
  const described = run.every > 1 ? `One of ${run.every} steps is listed. ` : "";
  const texts = source.live || run.texts.length >= steps ? ""
    : `Texts and tokens of ${number(run.texts.length)} of ${number(steps)} steps are in this file (marked ●). `;
  const blind = run.tokens_known === false
    ? "The run's tokenizer is not at hand, so completions are shown without their tokens. " : "";
  const more = described || texts ? "slipstream watch RUN and slipstream rollouts RUN show all." : "";
  return hint(`${number(step.length)} rollouts that steps trained on; the timeline has those that failed or went stale. `,
    described, texts, blind, more);
}

const endings = (run) => [...new Set(run.rollouts.reason)];
const environmentMetrics = (run) => Object.keys(run.rollouts).filter((name) => name.startsWith("env/"));

function rolloutTools(run) {
  const set = (name, parse = Number) => (value) => {
    rollouts.filter[name] = value === "" ? undefined : parse(value);
    rollouts.shown = MAX_LISTED;
    applyFilter();
  };
  const bound = (label, placeholder, of, name) => field(label,
    { type: "number", step: "any", placeholder, "aria-label": of }, set(name));
  const between = (label, column) => el("div", { class: "between" },
    bound(label, "min", `${label}, at least`, `${column}Low`), bound("", "max", `${label}, at most`, `${column}High`));
  const among = (label, values, name) => select(label, [["", "any"], ...values.map((value) => [value, value])], "",
    set(name, String));
  const names = environmentMetrics(run);
  fill($("#rollouts .tools"), runPicker(), between("Step", "step"), between("Reward", "reward"),
    between("Length (tokens)", "tokens"), among("Ended by", endings(run), "reason"),
    names.length ? [among("Metric", names, "metric"), between("Metric value", "metric")] : null,
    labelled("Text", el("input", { type: "search", placeholder: "contains …, Enter",
      onchange: (event) => searchTexts(event.target.value) })),
    select("Order", [["step", "newest first"], ["reward", "highest reward"], ["-reward", "lowest reward"],
      ["tokens", "longest"], ["advantage", "highest advantage"]], rollouts.order,
      (value) => { rollouts.order = value; applyFilter(); }),
    button("Clear", drawRollouts));
}

function applyFilter() {
  const columns = state.data.runs[state.run].rollouts;
  const { filter, search } = rollouts;
  const metric = columns[filter.metric];
  const inside = (column, i, name) => {
    const [low, high] = [filter[`${name}Low`], filter[`${name}High`]];
    return (low === undefined && high === undefined) || (column[i] !== null && !(column[i] < low) && !(column[i] > high));
  };
  const matches = [];
  for (let i = 0; i < columns.step.length; i += 1) {
    if (["step", "reward", "tokens"].every((name) => inside(columns[name], i, name))
      && (filter.reason === undefined || columns.reason[i] === filter.reason)
      && (!metric || (metric[i] !== null && inside(metric, i, "metric")))
      && (!search || search.has(`${columns.step[i]} ${columns.visit[i]} ${columns.rollout[i]}`))) matches.push(i);
  }
  const key = rollouts.order.replace("-", "");
  const sign = rollouts.order.startsWith("-") ? 1 : -1;
  rollouts.matches = matches.sort((a, b) => sign * (columns[key][a] - columns[key][b])
    || columns.step[b] - columns.step[a] || a - b);
  drawHistogram(columns);
  drawList();
}

// A bar for each range of rewards of the matching rollouts; a click narrows the filter to it.
function drawHistogram(columns) {
  const rewards = rollouts.matches.map((i) => columns.reward[i]).filter((reward) => reward !== null);
  const distinct = [...new Set(rewards)].sort((a, b) => a - b);
  const [low, high] = [distinct[0], distinct[distinct.length - 1]];
  const exact = distinct.length <= 16;
  const ranges = exact ? distinct.map((value) => [value, value]) : Array.from({ length: 24 }, (_, i) =>
    [low + ((high - low) * i) / 24, low + ((high - low) * (i + 1)) / 24]);
  const counts = ranges.map(() => 0);
  const index = new Map(distinct.map((value, i) => [value, i]));
  for (const reward of rewards) counts[exact ? index.get(reward) : Math.min(23,
    Math.floor(((reward - low) / (high - low)) * 24))] += 1;
  const most = Math.max(1, ...counts);
  const bars = ranges.map(([from, to], i) => {
    const title = `Reward ${exact ? number(from) : `${number(from, 3)} to ${number(to, 3)}`}: ${counts[i]} rollouts`;
    const height = `${Math.max(counts[i] ? 2 : 0, (72 * counts[i]) / most)}px`;
    return button([muted(counts[i] ? number(counts[i]) : ""), el("i", { style: { height } }), el("span", {}, number(from, 2))],
      () => narrow(from, to), { class: "bar-button", "aria-label": title, title });
  });
  const average = rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length;
  const summary = `${number(rollouts.matches.length)} rollouts, mean reward ${number(average, 3)}. `
    + "Click a bar to see the rollouts behind it.";
  fill($("#rollouts .histogram"), hint(rewards.length ? summary : "No rollout matches."), el("div", { class: "bars" }, bars));
}

function narrow(low, high) {
  Object.assign(rollouts.filter, { rewardLow: low, rewardHigh: high });
  const inputs = document.querySelectorAll('#rollouts input[aria-label^="Reward,"]');
  [low, high].forEach((value, i) => { inputs[i].value = String(+value.toPrecision(6)); });
  applyFilter();
}

function drawList() {
  const columns = state.data.runs[state.run].rollouts;
  const shown = rollouts.matches.slice(0, rollouts.shown);
  const head = ["Text", "Step", "Task", "Reward", "Advantage", "Tokens", "Turns", "Versions", "Ended by"];
  const rows = shown.map((i) => {
    const { step, visit, rollout, task, reward, advantage, tokens, turns, oldest, newest, reason } = Object.fromEntries(
      Object.entries(columns).map(([name, column]) => [name, column[i]]));
    const known = source.has(state.run, step);
    const cells = [known ? "●" : "○", number(step), task, number(reward, 3), number(advantage, 3), number(tokens),
      turns, oldest === newest ? oldest : `${oldest}–${newest}`, reason];
    const open = () => openGroup(step, visit, rollout);
    return el("tr", { tabindex: "0", onclick: open, onkeydown: (event) => { if (event.key === "Enter") open(); },
      title: known ? "Show its group" : "The text of this step is not in this file" }, cells.map((cell) => el("td", {}, cell)));
  });
  const showMore = button(`Show more of ${number(rollouts.matches.length)}`, () => { rollouts.shown *= 4; drawList(); });
  fill($("#rollouts .list"), el("div", { class: "scroll" }, el("table", { class: "rollouts" },
    el("thead", {}, el("tr", {}, head.map((name) => el("th", { scope: "col" }, name)))), el("tbody", {}, rows))),
  rollouts.matches.length > rollouts.shown ? showMore : null);
}

const textOf = (block, turn) => (turn.tokens ? turn.tokens.map((i) => block.pieces[i]).join("") : turn.text);

// Keeps the rollouts whose prompt, completions or environment text contain the words; reads every text in the file.
async function searchTexts(words) {
  rollouts.search = words ? new Set() : null;
  if (words && source.live) rollouts.search = new Set(await ask("search", { run: state.run, text: words }));
  else for (const step of words ? state.data.runs[state.run].texts : []) {
    const block = await source.step(state.run, step);
    for (const { prompt, visit, rollouts: members } of block.groups) {
      for (const { rollout, turns } of members) {
        const text = [prompt, ...turns.flatMap((turn) => [turn.environment || "", textOf(block, turn)])].join("\n");
        if (text.toLowerCase().includes(words.toLowerCase())) rollouts.search.add(`${step} ${visit} ${rollout}`);
      }
    }
  }
  applyFilter();
}

async function openGroup(step, visit, member) {
  const view = $("#rollouts .group-view");
  const block = source.has(state.run, step) ? await source.step(state.run, step, visit) : null;
  const group = block?.groups.find((each) => each.visit === visit);
  const close = button("Close", () => fill(view));
  if (!group) {
    const missing = `The text of this group of step ${step} is not in this file. `;
    fill(view, el("div", { class: "group-head" }, empty(`${missing}Print it: slipstream rollouts RUN --step ${step}`), close));
  } else {
    const colours = select("Colour by", [["version", "version"], ["logprob", "log-probability"],
      ["advantage", "advantage"], ["mask", "loss mask"], ["none", "nothing"]], rollouts.colour,
      (value) => { rollouts.colour = value; openGroup(step, visit, member); });
    fill(view,
      el("div", { class: "group-head" }, el("h3", {}, `Step ${step}, task `, group.task), colours, close),
      tokenKeys(group), el("pre", { class: "prompt" }, group.prompt, cutNote(group.cut, "characters")),
      el("div", { class: "members" }, group.rollouts.map((each) => memberView(block, each, each.rollout === member))));
  }
  for (const node of [view.querySelector(".picked"), view]) node?.scrollIntoView({ block: "nearest" });
}

// Sort rollouts by reward, and open the text of the first one whose text the page has.
function showBest(run) {
  rollouts.order = "reward";
  showRun(state.data.runs.indexOf(run));
  const { step, visit, rollout } = run.rollouts;
  const best = rollouts.matches.find((i) => source.has(state.run, step[i]));
  if (best !== undefined) openGroup(step[best], visit[best], rollout[best]);
  $("#rollouts").scrollIntoView();
}

const cutNote = (cut, what) => (cut ? el("span", { class: "cut" }, ` … ${number(cut)} more ${what} are cut`) : null);

function memberView(block, rollout, picked) {
  const metrics = Object.entries(rollout.metrics).map(([name, value]) => muted(`${name} ${number(value, 3)}`));
  const head = [`reward ${number(rollout.reward, 3)}`, rollout.advantage === null ? "left out of the loss"
    : `advantage ${number(rollout.advantage, 3)}`, rollout.role].filter(Boolean);
  return el("article", { class: picked ? "member picked" : "member" }, el("header", {},
    el("b", {}, `#${rollout.rollout}`), head.map((text) => el("span", {}, text)), metrics),
    rollout.turns.map((turn, i) => [
      turn.environment === undefined ? null : el("pre", { class: "environment", title: "said by the environment" },
        turn.environment, cutNote(turn.environment_cut, "characters")),
      el("div", { class: "turn-head" }, rollout.turns.length > 1 ? `turn ${i + 1}, ` : "", `${number(turn.length)} tokens, `,
        el("span", { class: turn.finish === "stop" ? "" : "unusual" }, turn.finish),
        turn.steps.length ? `, process rewards ${turn.steps.map((step) => number(step.reward, 3)).join(", ")}` : ""),
      turnView(block, turn, rollout)]));
}

function turnView(block, turn, rollout) {
  const node = el("pre", { class: "completion" });
  if (!turn.tokens) return fill(node, turn.text || "(nothing)", cutNote(turn.cut, "characters"));
  const inTools = toolTokens(block, turn);
  const show = (limit) => fill(node,
    turn.tokens.slice(0, limit).map((piece, i) => tokenSpan(block.pieces[piece], i, turn, rollout, inTools[i])),
    turn.tokens.length > limit ? button(`Show all ${number(turn.tokens.length)} tokens`, () => show(Infinity))
      : cutNote(turn.cut, "tokens"));
  return show(MAX_SPANS);
}

// Whether each token belongs to a tool call in the Hermes/Qwen format.
function toolTokens(block, turn) {
  const text = textOf(block, turn);
  const ranges = [...text.matchAll(/<tool_call>[^]*?(<\/tool_call>|$)/g)]
    .map(({ index, 0: call }) => [index, index + call.length]);
  let at = 0;
  return turn.tokens.map((piece) => {
    const start = at;
    at += block.pieces[piece].length;
    return ranges.some(([from, to]) => start < to && at > from);
  });
}

function tokenSpan(text, i, turn, { advantage }, inTool) {
  const hundredths = turn.logprobs[i] ?? null;
  const logprob = hundredths === null ? null : hundredths / -100;
  const [version] = turn.spans.find(([, start, end]) => i >= start && i < end) || [null];
  const percent = logprob === null ? "–" : number(Math.exp(logprob) * 100, 3);
  const title = `version ${version ?? "–"}, log-probability ${number(logprob, 3)} (${percent} %), `
    + `advantage ${number(advantage, 3)}`;
  return el("span", { class: `token ${tokenClass(version, logprob, advantage)}${inTool ? " tool" : ""}`, title }, text);
}

// The classes of tokens, each with its meaning, by what colours them.
const TOKEN_CLASSES = {
  logprob: [["surprise0", "p > 0.9"], ["surprise1", "> 0.5"], ["surprise2", "> 0.2"], ["surprise3", "> 0.05"],
    ["surprise4", "≤ 0.05"]],
  advantage: [["minus2", "below −1"], ["minus1", "negative"], ["plus1", "positive"], ["plus2", "above 1"]],
  mask: [["trained", "has a gradient"], ["masked", "no advantage, or left out"]],
};

function tokenClass(version, logprob, advantage) {
  if (rollouts.colour === "version" && version !== null) return `version${version % 6}`;
  if (rollouts.colour === "logprob" && logprob !== null) {
    return `surprise${[-0.1, -0.7, -1.6, -3].filter((limit) => logprob < limit).length}`;
  }
  if (rollouts.colour === "advantage" && advantage) {
    return `${advantage > 0 ? "plus" : "minus"}${Math.abs(advantage) > 1 ? 2 : 1}`;
  }
  if (rollouts.colour === "mask") return advantage ? "trained" : "masked";
  return "";
}

function tokenKeys(group) {
  const spans = group.rollouts.flatMap(({ turns }) => turns).flatMap((turn) => turn.spans || []);
  const versions = [...new Set(spans.map(([version]) => version))].sort((a, b) => a - b)
    .map((version) => [`version${version % 6}`, `version ${version}`]);
  const keys = rollouts.colour === "version" ? versions : TOKEN_CLASSES[rollouts.colour] || [];
  return el("div", { class: "keys" }, keys.map(([name, label]) => el("span", { class: `token ${name}` }, label)),
    el("span", { class: "token tool" }, "tool call"), el("span", { class: "environment" }, "environment"));
}
