// The tokens of the answer and of the target, coloured by role, by loss or by whether the model had a choice.

// Role → its name on the page, and what it means.
const ROLES = {
  MASKED: ["not trained", "the answer's own text that nothing supervises: separators, unmatched and invalid entries"],
  MATCHED_STRUCT: ["found: structure", "keys, quotes and brackets of a matched object in the answer"],
  MATCHED_DESC: ["found: name", "a matched object's description in the answer"],
  MATCHED_COORD: ["found: coordinates", "a matched object's coordinate in the answer, trained towards the ground truth"],
  REWRITTEN_STRUCT: ["rewritten: structure", "keys, quotes and brackets of a matched object in the rewritten answer, trained"],
  REWRITTEN_DESC: ["rewritten: name", "a matched object's description as the annotation has it, trained"],
  GT_STRUCT: ["added: structure", "structure of an appended object, which the answer had missed"],
  GT_DESC: ["added: name", "an appended object's description"],
  GT_COORD: ["added: coordinates", "an appended object's coordinate"],
  SOFT_COORD: ["soft: coordinates", "a soft object's coordinate: its text is trained by weight, its coordinates are not"],
  CLOSE: ["closing brace", "the closing brace"],
  EOS: ["end of turn", "the end of the turn"],
  BEHIND_CUT: ["cut off", "written by the model after the cut, not part of the target"],
};

// Positions of the tokens with which an object's entry begins: each starts a line.
const entryStarts = (pieces) => {
  const text = pieces.join("");
  const found = new Set();
  let [at, length] = [0, 0];
  for (const entry of text.matchAll(/"object_\d+"/g)) {
    while (at < pieces.length && length + pieces[at].length <= entry.index) {
      length += pieces[at].length;
      at += 1;
    }
    found.add(at);
  }
  return found;
};

const tokens = (box, content, text) => {
  if (content === null) {
    box.replaceChildren(text);
    return;
  }
  const loss = new Map(content.loss);
  const worst = Math.max(1e-9, ...loss.values());
  const nodes = [];
  const starts = entryStarts(content.pieces);
  const forced = new Set(content.forced.flatMap(([first, count]) => Array.from({ length: count }, (_, k) => first + k)));
  let at = 0;
  for (const [role, count] of content.roles) {
    for (let k = 0; k < count; k += 1, at += 1) {
      const node = document.createElement("span");
      node.className = role;
      if (starts.has(at) && nodes.length) nodes.push(document.createElement("br"));
      if (content.pieces[at].startsWith("<|coord_")) node.classList.add("whole");
      if (forced.has(at)) node.classList.add("forced");
      node.textContent = content.pieces[at].replaceAll("\n", "↵\n");
      node.dataset.at = at;
      if (loss.has(at)) {
        node.dataset.loss = loss.get(at);
        node.style.setProperty("--loss", (0.9 * loss.get(at)) / worst);
      }
      nodes.push(node);
    }
  }
  if (nodes.length) box.replaceChildren(...nodes);
  else box.replaceChildren("(no tokens)");
};

const lossLegend = () => {
  const losses = (current?.target?.loss ?? []).map(([, loss]) => loss);
  if (!losses.length) return [el("span", { class: "plain" }, "no losses were recorded for this answer")];
  return [el("span", { class: "plain" }, "0"), el("span", { class: "scale" }),
    el("span", { class: "plain" }, `${round(Math.max(...losses))} nats, the target's worst; uncoloured: no loss`)];
};
const choiceLegend = () => {
  const { pieces, forced } = current?.rollout ?? { pieces: [], forced: [] };
  const dimmed = forced.reduce((sum, [, count]) => sum + count, 0);
  return [el("span", { class: "decided", title: "names, coordinates, the kind of shape, and whether another object follows" },
    `decided by the model: ${pieces.length - dimmed} of ${pieces.length}`),
    el("span", { class: "forced", title: "all valid answers have this token here" }, `forced by JSON: ${dimmed}`)];
};
const legend = () => {
  const by = byId("colour").value;
  for (const name of ["loss", "choice"]) byId("record").classList.toggle(`by-${name}`, by === name);
  const roles = Object.entries(ROLES).map(([role, [name, title]]) => el("span", { class: role, title: `${role}: ${title}` }, name));
  byId("legend").replaceChildren(...(by === "loss" ? lossLegend() : by === "choice" ? choiceLegend() : roles));
};
