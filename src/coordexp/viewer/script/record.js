// One record: its name, its picture with the shapes over it, and the tables beside it.

const show = (record) => {
  current = record;
  for (const row of byId("list").querySelectorAll("[aria-current]")) row.removeAttribute("aria-current");
  byId("record").hidden = record === null;
  byId("nothing").hidden = record !== null;
  byId("nothing").textContent = records.length
    ? "No record is left: choose another filter or step, or clear the search."
    : "No records of single answers here, only curves. A run writes records with "
      + "rollout_matching.monitor_dump.enabled: true.";
  drawMarkers();
  if (record === null) return;
  const row = byId("list").querySelector(`[data-number="${record.number}"]`);
  if (row) {
    row.setAttribute("aria-current", "true");
    row.scrollIntoView({ block: "nearest" });
  }
  byId("file").textContent = record.file;
  byId("name").textContent = record.sample_id;
  byId("name").hidden = record.sample_id === record.file;
  byId("badges").replaceChildren(...badges(record));
  byId("stage").replaceChildren(...picture(record));
  byId("facts").replaceChildren(...facts(record));
  tokens(byId("rollout"), record.rollout, record.text || "(an empty answer)");
  tokens(byId("target"), record.target, "");
  byId("target-title").hidden = byId("target").hidden = record.target === null;
  byId("token-bar").hidden = record.target === null;
  legend();
};

const badges = (record) => {
  const all = [
    [record.step === null ? "" : `step ${record.step}`, false],
    [`${record.width} × ${record.height}`, false],
    [record.annotated ? `${record.gt.length - record.soft} annotated` : "not annotated", false],
    [record.soft ? `${record.soft} soft` : "", false],
    [`${record.pred.length} predicted`, false],
    [record.missed ? `${record.missed} missed` : "", true],
    [record.unmatched ? `${record.unmatched} unmatched` : "", true],
    [record.truncated ? "truncated" : "", true],
    [record.repeat_terminated ? "ended by the repeat guard" : "", true],
  ];
  return all.filter(([text]) => text).map(([text, bad]) => el("span", { class: bad ? "badge bad" : "badge" }, text));
};

const points = (object) => {
  const b = object.bins;
  if (object.kind === "bbox_2d") return [[b[0], b[1]], [b[2], b[1]], [b[2], b[3]], [b[0], b[3]]];
  return b.flatMap((_, at) => (at % 2 ? [] : [[b[at], b[at + 1]]]));
};
const centre = (object) => {
  const all = points(object);
  const mean = (axis) => all.reduce((sum, point) => sum + point[axis], 0) / all.length;
  return [mean(0), mean(1)];
};
const extent = (object) => {
  const all = points(object);
  const side = (axis) => {
    const values = all.map((point) => point[axis]);
    return Math.max(...values) - Math.min(...values);
  };
  return side(0) * side(1);
};
// A soft object is neither missed nor found: nobody annotated it. Nor is what was predicted in its place right or wrong.
const isSoft = (record, side, object) => {
  const annotation = side === "gt" ? object : record.gt[object.partner];
  return annotation !== undefined && annotation.soft !== null;
};
const stateOf = (record, side, object) => {
  if (isSoft(record, side, object)) return "soft";
  const [good, bad] = side === "gt" ? ["found", "missed"] : ["right", "wrong"];
  return object.partner === null && record.annotated ? bad : good;
};

const picture = (record) => {
  const image = images[record.image];
  const ground = image.src
    ? el("img", { src: image.src, alt: "" })
    : el("div", { class: "lost" }, el("span", {}, `image not shown: ${image.error}`));
  if (!image.src) ground.style.aspectRatio = `${record.width} / ${record.height}`;
  const overlay = shape("svg", { viewBox: "0 0 999 999", preserveAspectRatio: "none" });
  record.pred.forEach((object) => {
    if (object.partner === null) return;
    const [[x1, y1], [x2, y2]] = [centre(object), centre(record.gt[object.partner])];
    overlay.append(shape("line", { class: "link", x1, y1, x2, y2 }));
  });
  const outlines = ["gt", "pred"].flatMap((side) => record[side].map((object, number) => [
    extent(object),
    shape("polygon", {
      class: `${side} ${stateOf(record, side, object)}`, points: points(object).map((p) => p.join(",")).join(" "),
      tabindex: 0, "data-side": side, "data-index": number, "aria-label": says(record, side, number),
    }),
  ]));
  // The largest first: what lies inside another can then be pointed at.
  outlines.sort((a, b) => b[0] - a[0]);
  overlay.append(...outlines.map(([, outline]) => outline));
  byId("stage").style.maxWidth = `min(760px, ${(58 * record.width) / record.height}vh)`;
  return [ground, overlay, ...labels(record)];
};

// What each predicted object is called, and what was missed: at the upper left of its outline.
const labels = (record) => {
  const label = (side) => (object) => {
    const [x, y] = [0, 1].map((axis) => Math.min(...points(object).map((point) => point[axis])) / 9.99);
    const state = stateOf(record, side, object);
    return el("span", { class: `label of-${side} is-${state}`, style: `left:${x}%;top:${y}%` }, object.desc);
  };
  const missed = record.gt.filter((object) => object.partner === null);
  return [...missed.map(label("gt")), ...record.pred.map(label("pred"))];
};

const says = (record, side, number) => {
  const object = record[side][number];
  if (side === "gt" && object.soft !== null) {
    return `soft: ${object.desc} · nobody annotated it, weight ${round(object.soft)}`;
  }
  if (side === "gt") {
    const found = object.partner === null ? "missed" : `found, IoU ${round(record.pred[object.partner].iou)}`;
    return `ground truth: ${object.desc} · ${found}`;
  }
  const matched = object.partner === null
    ? "unmatched" : `matches ${record.gt[object.partner].desc}, IoU ${round(object.iou)}`;
  const score = object.score === null ? "" : ` · score ${round(object.score)}`;
  return `${object.name}: ${object.desc} · ${record.annotated ? matched : "not annotated"}${score}`;
};

const table = (title, rows) => el("table", {}, el("caption", {}, title), ...rows);
const line = (name, value) => el("tr", {}, el("th", {}, name), el("td", {}, value));

// Predictions as the model wrote them, each with what it is matched to; then what was missed.
const objectRows = (record) => {
  const row = (side, number, name, desc, value) => el("tr", { "data-side": side, "data-index": number },
    el("th", {}, el("span", { class: `key ${stateOf(record, side, record[side][number])}` }), name),
    el("td", { class: "desc" }, desc), el("td", {}, value));
  const predicted = record.pred.map((object, number) => {
    const truth = object.partner === null ? null : record.gt[object.partner].desc;
    const value = truth === null ? (record.annotated ? "unmatched" : "") : `IoU ${round(object.iou)}`;
    const given = isSoft(record, "pred", object) ? "soft" : "annotated";
    const desc = truth === null || truth === object.desc ? object.desc : `${object.desc} (${given}: ${truth})`;
    return row("pred", number, object.name, desc, value);
  });
  const missed = record.gt.flatMap((object, number) => (object.partner === null
    ? [row("gt", number, "–", object.desc, object.soft === null ? "missed" : "soft")] : []));
  return [...predicted, ...missed];
};

const facts = (record) => {
  const objects = objectRows(record);
  const parts = [objects.length ? el("div", { class: "objects" }, table("objects", objects))
    : el("p", {}, record.annotated ? "Nothing annotated, nothing predicted." : "Nothing predicted.")];
  const dropped = Object.entries(record.dropped);
  if (dropped.length) {
    parts.push(table("dropped entries, by reason", dropped.map(([k, v]) => line(k, String(v)))));
  }
  if (record.loss_by_role) {
    const rows = Object.entries(record.loss_by_role).map(([role, loss]) => line(role, round(loss)));
    parts.push(table("mean loss by role, in nats", rows));
  }
  return parts;
};
