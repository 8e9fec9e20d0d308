// The tokens of the answer and of the target, coloured by role or by loss.

const ROLES = {
  PREFIX_MASKED: "the answer's own text that nothing supervises: separators, unmatched and invalid entries",
  PREFIX_STRUCT: "keys, quotes and brackets of a matched object in the answer",
  PREFIX_DESC: "a matched object's description in the answer",
  PREFIX_COORD: "a matched object's coordinate in the answer: pulled to the ground truth",
  REWRITTEN_STRUCT: "keys, quotes and brackets of a matched object in the rewritten answer: taught",
  REWRITTEN_DESC: "a matched object's description in the rewritten answer, as the annotation has it: taught",
  TAIL_STRUCT: "structure of an appended object, which the answer had missed",
  TAIL_DESC: "an appended object's description",
  TAIL_COORD: "an appended object's coordinate",
  SOFT_COORD: "a soft object's coordinate: its text is taught by weight, its coordinates are not",
  CLOSE: "the closing brace",
  EOS: "the end of the turn",
  BEHIND_CUT: "written by the model behind the cut: no part of the target",
};

const tokens = (box, content, text) => {
  if (content === null) {
    box.replaceChildren(text);
    return;
  }
  const loss = new Map(content.loss);
  const worst = Math.max(1e-9, ...loss.values());
  const nodes = [];
  let at = 0;
  for (const [role, count] of content.roles) {
    for (let k = 0; k < count; k += 1, at += 1) {
      const node = document.createElement("span");
      node.className = role;
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
const legend = () => {
  const byLoss = byId("colour").value === "loss";
  byId("record").classList.toggle("by-loss", byLoss);
  const roles = Object.entries(ROLES).map(([role, title]) => el("span", { class: role, title }, role));
  byId("legend").replaceChildren(...(byLoss ? lossLegend() : roles));
};
