// All listed records as thumbnails, and one picture enlarged.

let inGrid = false;
const drawGrid = () => {
  byId("grid").hidden = !inGrid || !shown.length;
  byId("grid-button").setAttribute("aria-pressed", String(inGrid));
  if (byId("grid").hidden) {
    byId("grid").replaceChildren();
    return;
  }
  const drawn = [...byId("grid").children].map((tile) => Number(tile.dataset.number));
  const wanted = shown.map((record) => record.number);
  if (drawn.length !== wanted.length || drawn.some((number, k) => number !== wanted[k]) || gridThreshold !== threshold) {
    byId("grid").replaceChildren(...shown.map(tile));
    gridThreshold = threshold;
  }
  for (const one of byId("grid").children) {
    one.toggleAttribute("aria-current", current !== null && Number(one.dataset.number) === current.number);
  }
};
let gridThreshold = 0;
const tile = (record) => {
  const box = el("div", { class: "stage" }, ...picture(record));
  for (const outline of box.querySelectorAll("[tabindex]")) outline.removeAttribute("tabindex");
  box.style.aspectRatio = `${record.width} / ${record.height}`;
  const facts = [record.missed ? `${record.missed} missed` : "", record.unmatched ? `${record.unmatched} unmatched` : ""];
  return el("button", { type: "button", class: "tile", "data-number": record.number }, box,
    el("span", {}, record.file), el("span", { class: "sub" }, facts.filter(Boolean).join(" · ")));
};
const switchGrid = (to = !inGrid) => {
  inGrid = to;
  show(current);
};

let scale = 1;
const enlarge = (record = current) => {
  if (record === null) return;
  const source = data.served && images[record.image].src ? `image/${record.image}` : null;
  const box = el("div", { class: "stage", "data-run": record === current ? 0 : 1 }, ...picture(record, source));
  byId("zoomed").replaceChildren(box);
  if (!byId("zoom").open) byId("zoom").showModal();
  // As large as fits, at first.
  const room = [byId("zoomed").clientWidth / record.width, byId("zoomed").clientHeight / record.height];
  scale = Math.min(...room);
  box.dataset.width = record.width;
  scaleTo(scale);
};
const scaleTo = (wanted) => {
  const box = byId("zoomed").firstChild;
  const { clientWidth, clientHeight, scrollLeft, scrollTop } = byId("zoomed");
  const grown = wanted / scale;
  scale = Math.min(16, Math.max(0.02, wanted));
  box.style.width = `${scale * Number(box.dataset.width)}px`;
  byId("scale").textContent = `${Math.round(100 * scale)} %`;
  // The middle stays in the middle.
  byId("zoomed").scrollTo((scrollLeft + clientWidth / 2) * grown - clientWidth / 2,
    (scrollTop + clientHeight / 2) * grown - clientHeight / 2);
};
