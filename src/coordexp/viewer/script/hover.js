// What the page says about the thing under the pointer or in focus.

const tip = byId("tip");
const say = (text, event) => {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const [x, y] = "clientX" in event && event.clientX ? [event.clientX, event.clientY]
    : [event.target.getBoundingClientRect().left, event.target.getBoundingClientRect().top];
  tip.style.left = `${Math.max(0, Math.min(x + 12, window.innerWidth - box.width - 4))}px`;
  tip.style.top = `${y + 16 + box.height > window.innerHeight ? y - box.height - 8 : y + 16}px`;
};
const light = (run, side, index) => {
  byId("stages").querySelector(`.stage[data-run="${run}"] [data-side="${side}"][data-index="${index}"]`)
    ?.classList.add("lit");
};
const onObject = (node, event) => {
  const { side, index } = node.dataset;
  const { run } = node.closest("[data-run]").dataset;
  const record = runOf(node);
  say(says(record, side, Number(index)), event);
  light(run, side === "gt" ? "pred" : "gt", record[side][Number(index)].partner);
  if (node.tagName === "TR") light(run, side, index);
};
const onToken = (event) => {
  const { at, loss } = event.target.dataset;
  const role = event.target.classList[0];
  const mean = current.loss_by_role?.[role];
  say([`token ${at}`, role, loss === undefined ? "no loss" : `loss ${round(Number(loss))}`,
    mean === undefined ? "" : `mean of its role ${round(mean)}`].filter(Boolean).join(" · "), event);
};
const over = (event) => {
  const object = event.target.closest?.("[data-side]");
  if (object) onObject(object, event);
  else if (event.target.dataset?.at) onToken(event);
};
const overCurve = (event) => {
  const chart = event.target.closest?.("svg[data-curve]");
  if (!chart) return;
  const [step, value] = pointAt(chart, event.clientX);
  say(`${chart.dataset.curve} · step ${step}: ${round(value)}`, event);
};
const out = () => {
  tip.hidden = true;
  for (const node of byId("stages").querySelectorAll(".lit")) node.classList.remove("lit");
};
