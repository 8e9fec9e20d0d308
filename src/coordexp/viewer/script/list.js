// The data, and the list of records that the filter, the search and the step leave.
// Everything from the data reaches the page by textContent or setAttribute: it is text, whatever it looks like.
const began = performance.now();
const byId = (id) => document.getElementById(id);
const data = JSON.parse(byId("data").textContent);
const images = JSON.parse(byId("images").textContent);
const SVG = "http://www.w3.org/2000/svg";

const el = (name, attributes = {}, ...children) => {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
};
const shape = (name, attributes) => {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
};
const round = (value) => (value === null || value === undefined ? "–" : Number(value.toPrecision(4)).toString());
const counted = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

const records = data.records.map((record, number) => ({
  ...record,
  number,
  missed: record.gt.filter((object) => object.partner === null && object.soft === null).length,
  soft: record.gt.filter((object) => object.soft !== null).length,
  unmatched: record.annotated ? record.pred.filter((object) => object.partner === null).length : 0,
  numDropped: Object.values(record.dropped).reduce((sum, count) => sum + count, 0),
  words: [record.file, record.sample_id, ...record.gt.map((o) => o.desc), ...record.pred.map((o) => o.desc)]
    .join("\n").toLowerCase(),
}));
const steps = [...new Set(records.map((record) => record.step).filter((step) => step !== null))]
  .sort((a, b) => a - b);

const FILTERS = {
  all: ["all records", () => true],
  missed: ["with missed objects (FN)", (r) => r.missed > 0],
  unmatched: ["with unmatched predictions (FP)", (r) => r.unmatched > 0],
  truncated: ["truncated answers", (r) => r.truncated],
  repeat: ["ended by the repeat guard", (r) => r.repeat_terminated],
  dropped: ["with dropped entries", (r) => r.numDropped > 0],
  perfect: ["all found, nothing else", (r) => r.annotated && !r.missed && !r.unmatched && !r.numDropped
    && !r.truncated],
};
const ORDERS = {
  run: ["as they were written", (a, b) => a.number - b.number],
  loss: ["worst loss first", (a, b) => (b.loss ?? -1) - (a.loss ?? -1)],
  missed: ["most missed first", (a, b) => b.missed - a.missed],
  unmatched: ["most unmatched first", (a, b) => b.unmatched - a.unmatched],
  dropped: ["most dropped first", (a, b) => b.numDropped - a.numDropped],
};

let shown = [];
let current = null;

const listed = () => {
  const wanted = byId("search").value.trim().toLowerCase();
  const step = Number(byId("step").value);
  const keep = FILTERS[byId("filter").value][1];
  return records
    .filter((r) => keep(r) && (!step || r.step === steps[step - 1]) && (!wanted || r.words.includes(wanted)))
    .sort(ORDERS[byId("order").value][1]);
};

const rowOf = (record) => {
  const facts = [
    record.sample_id === record.file ? "" : record.sample_id,
    record.annotated ? counted(record.gt.length, "object") : `${record.pred.length} predicted`,
    record.missed ? `${record.missed} missed` : "",
    record.unmatched ? `${record.unmatched} unmatched` : "",
    record.loss === null ? "" : `loss ${round(record.loss)}`,
  ].filter(Boolean);
  const step = record.step === null ? [] : [el("span", { class: "when" }, `step ${record.step}`)];
  return el("button", { type: "button", "data-number": record.number },
    el("span", { class: "who" }, record.file), ...step, el("span", { class: "sub" }, facts.join(" · ")));
};

const refresh = () => {
  const step = Number(byId("step").value);
  byId("step-name").textContent = step ? String(steps[step - 1]) : "all";
  shown = listed();
  byId("count").textContent = shown.length === records.length
    ? counted(records.length, "record") : `${shown.length} of ${counted(records.length, "record")}`;
  byId("list").replaceChildren(...shown.map(rowOf));
  if (!shown.includes(current)) current = shown[0] ?? null;
  show(current);
};

const move = (by) => {
  if (!shown.length) return;
  const at = Math.min(shown.length - 1, Math.max(0, shown.indexOf(current) + by));
  show(shown[at]);
};
