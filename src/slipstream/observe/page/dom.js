// Elements, numbers and colours. Text of runs becomes visible text nodes only, never markup.

const state = { data: null, axis: "step", smoothing: 0.3, hidden: new Set(), run: 0 };

function el(tag, properties, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  return fill(node, ...children);
}

// Replace the children of a node. Arrays may be nested; null is skipped.
function fill(node, ...children) {
  const known = children.flat(Infinity).filter((child) => child !== null && child !== undefined);
  node.replaceChildren(...known.map((child) => (child instanceof Node ? child : visible(child))));
  return node;
}

const $ = (selector) => document.querySelector(selector);
const muted = (...children) => el("span", { class: "muted" }, ...children);
const hint = (...children) => el("p", { class: "hint" }, ...children);
const empty = (text) => el("p", { class: "empty" }, text);
const button = (label, onclick, properties) => el("button", { type: "button", onclick, ...properties }, label);
// Prefix with the run's name if the page has several runs.
const ofRun = (run) => (several() ? `${run.name}: ` : "");
const isDark = () => {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};
const runColour = (index) => `run${index % 6}`;
// The value of a colour of the style sheet, for a canvas.
function cssColour(name) {
  const probe = document.body.appendChild(el("i", { style: { color: `var(--${name})` } }));
  const { color } = getComputedStyle(probe);
  probe.remove();
  return color;
}
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
const several = () => state.data.runs.length > 1;

// Control characters and marks that reorder text are shown as symbols.
function visible(text) {
  return String(text).replace(/[\x00-\x08\x0b-\x1f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0)))
    .replace(/[\x7f-\x9f\u200b\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g,
      (c) => `⟨${c.charCodeAt(0).toString(16).padStart(4, "0")}⟩`);
}

function number(value, digits = 4) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e9)) return value.toExponential(2);
  if (Number.isInteger(value) || size >= 1e4) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
}

function seconds(value) {
  if (value < 1) return `${number(value * 1000, 3)} ms`;
  if (value < 120) return `${number(value, 3)} s`;
  return `${clock(Math.floor(value), 1)} ${value < 3600 ? "min" : "h"}`;
}

// A time with as many decimals as steps need, in the unit that fits the largest one.
function clock(time, step, largest = time) {
  const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  if (largest < 120) return `${time.toFixed(decimals)} s`;
  const minutes = Math.floor(time / 60 + 1e-9);
  const rest = Math.max(0, time - 60 * minutes).toFixed(decimals).padStart(decimals ? decimals + 3 : 2, "0");
  return largest < 3600 ? `${minutes}:${rest}`
    : `${Math.floor(minutes / 60)}:${String(minutes % 60).padStart(2, "0")}:${rest}`;
}

const UNITS = [[/_ms$/, "ms"], [/tokens_per_s$/, "tokens/s"], [/_s$/, "s"], [/_gb$/, "GB"], [/tflops$/, "TFLOP/s"],
  [/^lag\//, "versions"], [/entropy$|kl$/, "nats"], [/tokens$|length$/, "tokens"],
    [/groups_(ready|in_flight)|capacity/, "groups"]];
const unit = (name) => (UNITS.find(([pattern]) => pattern.test(name)) || [0, ""])[1];

const labelled = (label, control) => el("label", {}, el("span", {}, label), control);
// `options` are [value, label].
const select = (label, options, value, onchange) => labelled(label,
  el("select", { onchange: (event) => onchange(event.target.value) },
    options.map(([key, text]) => el("option", { value: key, selected: String(key) === String(value) }, text))));
const field = (label, properties, onchange) => labelled(label,
  el("input", { ...properties, oninput: (event) => onchange(event.target.value) }));

const runPicker = () => (several()
  ? select("Run", state.data.runs.map((run, i) => [i, run.name]), state.run, showRun) : null);
function showRun(index) {
  state.run = +index;
  drawTimeline();
  drawRollouts();
}

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// Where the page's data comes from: the file itself, or the server of a live page.
const source = {
  live: document.documentElement.hasAttribute("data-live"),
  texts: new Map(),
  has(run, step) {
    return this.live || state.data.runs[run].texts.includes(step);
  },
  async step(run, step, visit) {
    const key = `texts-${run}-${step}${this.live ? `-${visit}` : ""}`;
    if (!this.texts.has(key)) {
      const found = this.live ? ask("texts", { run, step, visit }).catch(() => this.texts.delete(key) && null)
        : unpack(document.getElementById(key).textContent);
      this.texts.set(key, found);
    }
    return this.texts.get(key);
  },
};
