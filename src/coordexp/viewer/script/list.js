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

// At the current threshold: predictions below it are treated as if the model had not written them.
let threshold = 0;
const isKept = (object) => object.score === null || object.score === undefined || object.score >= threshold;
const partnerOf = (record, side, object) =>
  (object.partner !== null && (side === "pred" || isKept(record.pred[object.partner])) ? object.partner : null);
// The object that covers this one under another name: left over by matching, or matched whatever the names are.
const renamedOf = (record, side, object) => {
  if (object.renamed !== null) return side === "pred" || isKept(record.pred[object.renamed]) ? object.renamed : null;
  const at = partnerOf(record, side, object);
  return at !== null && record[side === "gt" ? "pred" : "gt"][at].desc !== object.desc ? at : null;
};
// A soft object is neither missed nor found: nobody annotated it. Nor is what was predicted in its place right or wrong.
const isSoft = (record, side, object) => {
  const annotation = side === "gt" ? object : record.gt[object.partner];
  return annotation !== undefined && annotation.soft !== null;
};
// Annotated objects that one run alone found, and names that one alone gave to what is not annotated.
// Annotations are counted by what they say: runs may have them in another order.
const differences = (one, other) => {
  const surplus = {};
  for (const [run, sign] of [[one, 1], [other, -1]]) {
    const found = run.gt.filter((o) => o.soft === null && partnerOf(run, "gt", o) !== null);
    const wrong = run.pred.filter((o) => isKept(o) && o.partner === null);
    for (const name of [...found.map((o) => `${o.bins}=${o.desc}`), ...wrong.map((o) => `=${o.desc}`)]) {
      surplus[name] = (surplus[name] ?? 0) + sign;
    }
  }
  return Object.values(surplus).reduce((sum, count) => sum + Math.abs(count), 0);
};
const recount = (record) => {
  const kept = record.pred.filter(isKept);
  record.predicted = kept.length;
  record.missed = record.gt.filter((o) => o.soft === null && partnerOf(record, "gt", o) === null).length;
  record.unmatched = record.annotated ? kept.filter((o) => o.partner === null).length : 0;
  record.misnamed = kept.filter((o) => !isSoft(record, "pred", o) && renamedOf(record, "pred", o) !== null).length;
  if (record.other) recount(record.other);
  record.change = record.other ? differences(record, record.other) : 0;
};
const completed = (record) => ({
  ...record,
  soft: record.gt.filter((object) => object.soft !== null).length,
  numDropped: Object.values(record.dropped).reduce((sum, count) => sum + count, 0),
});
const records = data.records.map((record, number) => ({
  ...completed(record),
  number,
  other: record.other ? completed(record.other) : null,
  words: [record.file, record.sample_id,
    ...[record.gt, record.pred, record.other?.pred ?? []].flat().map((o) => o.desc)].join("\n").toLowerCase(),
}));
records.forEach(recount);
const steps = [...new Set(records.map((record) => record.step).filter((step) => step !== null))]
  .sort((a, b) => a - b);

const FILTERS = {
  all: ["all records", () => true],
  missed: ["with missed objects (FN)", (r) => r.missed > 0],
  unmatched: ["with unmatched predictions (FP)", (r) => r.unmatched > 0],
  misnamed: ["right box, wrong name", (r) => r.misnamed > 0],
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
  misnamed: ["most wrong names first", (a, b) => b.misnamed - a.misnamed],
  dropped: ["most dropped first", (a, b) => b.numDropped - a.numDropped],
};
if (data.runs.length) {
  FILTERS.change = ["on which the runs differ", (r) => r.change > 0];
  ORDERS.change = ["runs differ most first", (a, b) => b.change - a.change];
}

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
    record.annotated ? counted(record.gt.length - record.soft, "object") : `${record.predicted} predicted`,
    record.missed ? `${record.missed} missed` : "",
    record.unmatched ? `${record.unmatched} unmatched` : "",
    record.misnamed ? `${record.misnamed} misnamed` : "",
    record.other ? `other run: ${record.other.missed} missed, ${record.other.unmatched} unmatched` : "",
    record.loss === null ? "" : `loss ${round(record.loss)}`,
  ].filter(Boolean);
  const step = record.step === null ? [] : [el("span", { class: "when" }, `step ${record.step}`)];
  return el("button", { type: "button", "data-number": record.number },
    el("span", { class: "who" }, record.file), ...step, el("span", { class: "sub" }, facts.join(" · ")));
};

// A record's name in the page's address, so that a link leads to it.
const linkOf = (record) => encodeURIComponent(record.step === null ? record.sample_id : `${record.sample_id}@${record.step}`);
const linked = () => records.find((record) => linkOf(record) === window.location.hash.slice(1)) ?? null;

// `first`: show the first record of the list, instead of the same one as before.
const refresh = (first = false) => {
  const step = Number(byId("step").value);
  byId("step-name").textContent = step ? String(steps[step - 1]) : "all";
  shown = listed();
  byId("count").textContent = shown.length === records.length
    ? counted(records.length, "record") : `${shown.length} of ${counted(records.length, "record")}`;
  byId("save-list").disabled = !shown.length;
  byId("list").replaceChildren(...shown.map(rowOf));
  if (first || !shown.includes(current)) current = shown[0] ?? null;
  show(current);
};

const move = (by) => {
  if (!shown.length) return;
  const at = Math.min(shown.length - 1, Math.max(0, shown.indexOf(current) + by));
  show(shown[at]);
};

// The listed records as a dataset to correct: annotations, or the answer where there are none. Names and paths as they
// are, not as they are shown; whole bins, which the merged answers of tiles do not have.
const asDataset = () => shown.map((record) => JSON.stringify({
  images: [record.path], width: record.width, height: record.height,
  objects: (record.annotated ? record.gt : record.pred.filter(isKept)).map((object) => ({
    desc: object.saved_desc ?? object.desc, [object.kind]: object.bins.map(Math.round),
    ...(object.soft === null ? {} : { soft: object.soft }),
  })),
  metadata: { sample_id: record.sample_id, drawn_from: record.annotated ? "annotations" : "answer",
    missed: record.missed, unmatched: record.unmatched, misnamed: record.misnamed },
})).map((line) => `${line}\n`).join("");
const saveList = () => {
  const address = URL.createObjectURL(new Blob([asDataset()], { type: "application/jsonl" }));
  el("a", { href: address, download: "selection.jsonl" }).click();
  URL.revokeObjectURL(address);
};
