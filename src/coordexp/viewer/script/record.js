// One record: its name, its picture with the shapes over it, and the tables beside it.

const show = (record) => {
  current = record;
  for (const row of byId("list").querySelectorAll("[aria-current]")) row.removeAttribute("aria-current");
  byId("record").hidden = record === null;
  byId("nothing").hidden = record !== null;
  byId("nothing").textContent = records.length
    ? "No record is left: choose another filter or step, or clear the search."
    : "Only curves: no answers of this run were recorded.";
  drawMarkers();
  byId("record").hidden ||= inGrid;
  byId("nothing").hidden ||= !records.length && Object.keys(data.curves).length > 0;
  drawGrid();
  if (record === null) return;
  window.history.replaceState(null, "", `#${linkOf(record)}`);
  const row = byId("list").querySelector(`[data-number="${record.number}"]`);
  if (row) {
    row.setAttribute("aria-current", "true");
    row.scrollIntoView({ block: "nearest" });
  }
  byId("file").textContent = record.file;
  byId("name").textContent = record.sample_id;
  byId("name").hidden = record.sample_id === record.file;
  byId("badges").replaceChildren(...badges(record));
  byId("stages").replaceChildren(...[record, record.other].filter(Boolean).map(stage));
  byId("facts").replaceChildren(...[record, record.other].filter(Boolean).flatMap(facts));
  byId("zoom").close();
  if (data.runs.length) byId("rollout-title").textContent = `answer of ${data.runs[0]}`;
  answer(byId("rollout"), record);
  byId("other-title").hidden = byId("other").hidden = record.other === null;
  if (record.other !== null) {
    byId("other-title").textContent = `answer of ${data.runs[1]}`;
    answer(byId("other"), record.other);
  }
  tokens(byId("target"), record.target, "");
  byId("target-title").hidden = byId("target").hidden = record.target === null;
  byId("token-bar").hidden = record.target === null;
  legend();
};

const answer = (box, record) => {
  const text = record.text.replaceAll(/, (?="object_\d+")/g, ",\n");
  tokens(box, record.rollout, text || "(an empty answer)");
};

const badges = (record) => {
  const all = [
    [record.step === null ? "" : `step ${record.step}`, false],
    [`${record.width} × ${record.height}`, false],
    [record.annotated ? `${record.gt.length - record.soft} annotated` : "not annotated", false],
    [record.soft ? `${record.soft} soft` : "", false],
    [`${record.predicted} predicted`, false],
    [record.missed ? `${record.missed} missed` : "", true],
    [record.unmatched ? `${record.unmatched} unmatched` : "", true],
    [record.misnamed ? `${record.misnamed} right box, wrong name` : "", true],
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
const stateOf = (record, side, object) => {
  if (isSoft(record, side, object)) return "soft";
  const partner = partnerOf(record, side, object);
  if (side === "gt") return partner === null && record.annotated ? "missed" : "found";
  if (renamedOf(record, side, object) !== null) return "misnamed";
  return partner === null && record.annotated ? "wrong" : "right";
};
const kept = (record, side) => record[side].map((object, number) => [object, number])
  .filter(([object]) => side === "gt" || isKept(object));

// The image with its outlines and names: the picture of a record, a tile of the grid, the enlarged picture.
const picture = (record, source = null) => {
  const image = images[record.image];
  const ground = image.src
    ? el("img", { src: source ?? image.src, alt: "", loading: "lazy", decoding: "async" })
    : el("div", { class: "lost" }, el("span", {}, `image not shown: ${image.error}`));
  if (!image.src) ground.style.aspectRatio = `${record.width} / ${record.height}`;
  const overlay = shape("svg", { viewBox: "0 0 999 999", preserveAspectRatio: "none" });
  for (const [object] of kept(record, "pred")) {
    if (object.partner === null) continue;
    const [[x1, y1], [x2, y2]] = [centre(object), centre(record.gt[object.partner])];
    overlay.append(shape("line", { class: "link", x1, y1, x2, y2 }));
  }
  const outlines = ["gt", "pred"].flatMap((side) => kept(record, side).map(([object, number]) => [
    extent(object),
    shape("polygon", {
      class: `${side} ${stateOf(record, side, object)}`, points: points(object).map((p) => p.join(",")).join(" "),
      tabindex: 0, "data-side": side, "data-index": number, "aria-label": says(record, side, number),
    }),
  ]));
  // The largest first: what lies inside another can then be pointed at.
  outlines.sort((a, b) => b[0] - a[0]);
  overlay.append(...outlines.map(([, outline]) => outline));
  return [ground, overlay, ...labels(record)];
};
const stage = (record, run) => {
  const box = el("div", { class: "stage", "data-run": run, title: "enlarge (z)" }, ...picture(record));
  box.style.maxWidth = `min(760px, ${(58 * record.width) / record.height}vh)`;
  return el("figure", {}, ...(data.runs.length ? [el("figcaption", {}, data.runs[run])] : []), box);
};
const runOf = (node) => (node.closest("[data-run]")?.dataset.run === "1" ? current.other : current);

// What each predicted object is called, and what was missed: at the upper left of its outline, or at the upper right if
// that is where the picture has room.
const labels = (record) => {
  const label = (side) => ([object]) => {
    const [xs, ys] = [0, 1].map((axis) => points(object).map((point) => point[axis] / 9.99));
    const [left, right] = [Math.min(...xs), Math.max(...xs)];
    const [place, room] = left > 50 ? [`right:${100 - right}%`, right] : [`left:${left}%`, 100 - left];
    const style = `${place};top:${Math.min(...ys)}%;max-width:${Math.min(60, room)}%`;
    return el("span", { class: `label of-${side} is-${stateOf(record, side, object)}`, style }, object.desc);
  };
  // A missed object with a prediction of another name in its place has that prediction's label.
  const missed = kept(record, "gt").filter(([object]) => partnerOf(record, "gt", object) === null
    && renamedOf(record, "gt", object) === null);
  return [...missed.map(label("gt")), ...kept(record, "pred").map(label("pred"))];
};

const says = (record, side, number) => {
  const object = record[side][number];
  if (side === "gt" && object.soft !== null) {
    return `soft: ${object.desc} · nobody annotated it, weight ${round(object.soft)}`;
  }
  const partner = partnerOf(record, side, object);
  const renamed = renamedOf(record, side, object);
  if (side === "gt") {
    if (partner !== null) return `ground truth: ${object.desc} · found, IoU ${round(record.pred[partner].iou)}`;
    const as = renamed === null ? "" : `, predicted as ${record.pred[renamed].desc}`;
    return `ground truth: ${object.desc} · missed${as}`;
  }
  const unmatched = renamed === null ? "unmatched" : `wrong name, annotated as ${record.gt[renamed].desc}`;
  const matched = partner === null ? unmatched : `matches ${record.gt[partner].desc}, IoU ${round(object.iou)}`;
  const score = object.score === null ? "" : ` · confidence ${round(object.score)}`;
  return `${object.name}: ${object.desc} · ${record.annotated ? matched : "not annotated"}${score}`;
};

const table = (title, rows) => el("table", {}, el("caption", {}, title), ...rows);
const line = (name, value) => el("tr", {}, el("th", {}, name), el("td", {}, value));

// Predictions as the model wrote them, each with what it is matched to; then what was missed.
const objectRows = (record) => {
  const scored = record.pred.some((object) => object.score !== null);
  const row = (side, number, name, desc, score, value) => el("tr", { "data-side": side, "data-index": number },
    el("th", {}, el("span", { class: `key ${stateOf(record, side, record[side][number])}` }), name),
    el("td", { class: "desc" }, desc), ...(scored ? [el("td", { class: "score" }, score)] : []), el("td", {}, value));
  const predicted = kept(record, "pred").map(([object, number]) => {
    const renamed = renamedOf(record, "pred", object);
    const truth = record.gt[renamed ?? object.partner]?.desc ?? null;
    const unmatched = renamed === null ? "unmatched" : "wrong name";
    const value = object.partner !== null ? `IoU ${round(object.iou)}` : (record.annotated ? unmatched : "");
    const given = isSoft(record, "pred", object) ? "soft" : "annotated";
    const desc = truth === null || truth === object.desc ? object.desc : `${object.desc} (${given}: ${truth})`;
    return row("pred", number, object.name, desc, object.score === null ? "" : object.score.toFixed(2), value);
  });
  const missed = kept(record, "gt").flatMap(([object, number]) => (partnerOf(record, "gt", object) === null
    ? [row("gt", number, "–", object.desc, "", object.soft === null ? "missed" : "soft")] : []));
  return [...predicted, ...missed];
};

const facts = (record, run) => {
  const objects = objectRows(record);
  const title = data.runs.length ? `objects of ${data.runs[run]}` : "objects";
  const parts = [objects.length ? el("div", { class: "objects", "data-run": run }, table(title, objects))
    : el("p", {}, record.annotated ? "Nothing annotated, nothing predicted." : "Nothing predicted.")];
  const dropped = Object.entries(record.dropped);
  if (dropped.length) {
    parts.push(table("dropped entries, by reason", dropped.map(([k, v]) => line(k, String(v)))));
  }
  if (record.loss_by_role) {
    const rows = Object.entries(record.loss_by_role).map(([role, loss]) => line(ROLES[role]?.[0] ?? role, round(loss)));
    parts.push(table("mean loss of its tokens, in nats", rows));
  }
  return parts;
};
