// The run's curves, with a mark at the record's step.

const PREFERRED = ["loss", "eval_rollout/f1", "eval_rollout/AP", "rollout/match_rate", "rollout/precision",
  "rollout/parse_truncated_rate", "rollout/duplicate_rate", "rollout/gen_new_tokens_mean",
  "coord_diag/expected_bin_mae"];

const drawCurves = () => {
  const names = Object.keys(data.curves);
  byId("curves").hidden = !names.length;
  document.querySelector("main").classList.toggle("no-curves", !names.length);
  if (!names.length) return;
  const first = PREFERRED.filter((name) => names.includes(name));
  const rest = names.filter((name) => !PREFERRED.includes(name)).sort((a, b) => a.localeCompare(b));
  const more = el("details", {}, el("summary", {}, `${counted(rest.length, "further metric")}`), ...rest.map(curve));
  more.open = !first.length;
  byId("curves").replaceChildren(...first.map(curve), ...(rest.length ? [more] : []));
};

// Not as arguments of Math.min: a browser takes about a hundred thousand.
const ends = (values) => values
  .reduce(([low, high], one) => [Math.min(low, one), Math.max(high, one)], [Infinity, -Infinity]);

const curve = (name) => {
  const points = data.curves[name];
  const [xs, ys] = [points.map((point) => point[0]), points.map((point) => point[1])];
  const [left, right, low, high] = [...ends(xs), ...ends(ys)];
  const x = (value) => (100 * (value - left)) / (right - left || 1);
  const y = (value) => 38 - (36 * (value - low)) / (high - low || 1);
  const chart = shape("svg", { viewBox: "0 0 100 40", preserveAspectRatio: "none", "data-curve": name,
    "data-left": left, "data-right": right });
  const drawn = (values, name) => chart.append(shape("polyline", { class: name,
    points: values.map((value, k) => `${x(xs[k])},${y(value)}`).join(" ") }));
  // Many points: the values pale, and over them the mean of the ten up to each.
  const mean = (k) => {
    const recent = ys.slice(Math.max(0, k - 9), k + 1);
    return recent.reduce((sum, value) => sum + value, 0) / recent.length;
  };
  drawn(ys, ys.length > 30 ? "raw" : "value");
  if (ys.length > 30) drawn(ys.map((_, k) => mean(k)), "value");
  const range = low === high ? "" : ` · ${round(low)} … ${round(high)}`;
  return el("figure", {}, el("figcaption", {}, el("span", { class: "who" }, name), el("b", {}, round(ys.at(-1))),
    el("span", { class: "range" }, `steps ${left}–${right}${range}`)), chart);
};

const drawMarkers = () => {
  for (const chart of byId("curves").querySelectorAll("svg")) {
    chart.querySelector("line.now")?.remove();
    if (current === null || current.step === null) continue;
    const [left, right] = [Number(chart.dataset.left), Number(chart.dataset.right)];
    const x = (100 * (current.step - left)) / (right - left || 1);
    if (x >= 0 && x <= 100) chart.append(shape("line", { class: "now", x1: x, x2: x, y1: 0, y2: 40 }));
  }
};

// The logged point nearest to where the pointer stands.
const pointAt = (chart, clientX) => {
  const box = chart.getBoundingClientRect();
  const [left, right] = [Number(chart.dataset.left), Number(chart.dataset.right)];
  const step = left + ((clientX - box.left) / box.width) * (right - left);
  return data.curves[chart.dataset.curve].reduce((best, point) =>
    (Math.abs(point[0] - step) < Math.abs(best[0] - step) ? point : best));
};

// A click on a curve chooses the recorded step nearest to it.
const toStep = (event) => {
  const chart = event.target.closest?.("svg[data-curve]");
  if (!chart || !steps.length) return;
  const [wanted] = pointAt(chart, event.clientX);
  const distance = (step) => Math.abs(step - wanted);
  byId("step").value = 1 + steps.reduce((best, step, k) => (distance(step) < distance(steps[best]) ? k : best), 0);
  refresh(true);
};
