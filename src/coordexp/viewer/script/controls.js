// Switches, keys, and the start.

const toggle = (name) => {
  const box = byId(`show-${name}`);
  byId("stage").classList.toggle(`hide-${name}`, !box.checked);
};
const flip = (name) => {
  byId(`show-${name}`).checked = !byId(`show-${name}`).checked;
  toggle(name);
};
const switchTheme = () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark"
    : window.matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
};
const switchHelp = () => {
  byId("help").hidden = !byId("help").hidden;
  byId("help-button").setAttribute("aria-expanded", String(!byId("help").hidden));
};
const turnStep = (by) => {
  const slider = byId("step");
  slider.value = Math.min(steps.length, Math.max(0, Number(slider.value) + by));
  refresh();
};
const switchColour = () => {
  byId("colour").value = byId("colour").value === "role" ? "loss" : "role";
  legend();
};
const KEYS = {
  j: () => move(1), ArrowDown: () => move(1), k: () => move(-1), ArrowUp: () => move(-1),
  g: () => flip("gt"), p: () => flip("pred"), l: () => flip("links"),
  n: () => flip("labels"), c: switchColour,
  "[": () => turnStep(-1), "]": () => turnStep(1), t: switchTheme, "?": switchHelp,
  "/": () => byId("search").focus(),
};
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") {
    document.activeElement.blur();
    out();
    return;
  }
  // Fields that take letters keep them; the slider keeps its arrows alone, so that j and k work after it was moved.
  const { tagName, type } = event.target;
  const typing = tagName === "SELECT" || (tagName === "INPUT" && !["checkbox", "range"].includes(type));
  const sliding = type === "range" && event.key.startsWith("Arrow");
  if (typing || sliding || !KEYS[event.key]) return;
  event.preventDefault();
  KEYS[event.key]();
});

for (const [id, choices] of [["filter", FILTERS], ["order", ORDERS]]) {
  byId(id).append(...Object.entries(choices).map(([value, [label]]) => el("option", { value }, label)));
  byId(id).addEventListener("change", refresh);
}
byId("search").addEventListener("input", refresh);
byId("step").max = steps.length;
byId("step").addEventListener("input", refresh);
byId("step-box").hidden = steps.length < 2;
byId("choices").hidden = !records.length;
byId("theme").addEventListener("click", switchTheme);
byId("help-button").addEventListener("click", switchHelp);
byId("colour").addEventListener("change", legend);
for (const name of ["gt", "pred", "links", "labels"]) byId(`show-${name}`).addEventListener("change", () => toggle(name));
byId("list").addEventListener("click", (event) => {
  const row = event.target.closest("button");
  if (row) show(records[Number(row.dataset.number)]);
});
for (const [name, react] of [["mouseover", over], ["focusin", over], ["mouseout", out], ["focusout", out]]) {
  byId("record").addEventListener(name, react);
}
byId("curves").addEventListener("mousemove", overCurve);
byId("curves").addEventListener("mouseout", out);

byId("title").textContent = data.title;
byId("title").title = data.title;
byId("notes").replaceChildren(...data.notes.map((note) => el("p", {}, note)));
drawCurves();
refresh();
document.documentElement.dataset.readyMs = String(Math.round(performance.now() - began));
