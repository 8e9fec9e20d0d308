// Switches, keys, and the start.

const toggle = (name) => {
  const box = byId(`show-${name}`);
  document.body.classList.toggle(`hide-${name}`, !box.checked);
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
  refresh(true);
};
const setThreshold = () => {
  threshold = Number(byId("score").value);
  byId("score-name").textContent = threshold ? threshold.toFixed(2) : "all";
  records.forEach(recount);
  refresh();
};
const switchColour = () => {
  const colour = byId("colour");
  colour.selectedIndex = (colour.selectedIndex + 1) % colour.length;
  legend();
};
const KEYS = {
  j: () => move(1), ArrowDown: () => move(1), k: () => move(-1), ArrowUp: () => move(-1),
  g: () => flip("gt"), p: () => flip("pred"), l: () => flip("links"),
  n: () => flip("labels"), c: switchColour,
  v: () => switchGrid(), z: () => enlarge(), s: () => saveList(), Enter: () => inGrid && switchGrid(false),
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
  if (byId("zoom").open) {
    if (event.key === "+" || event.key === "-") scaleTo(event.key === "+" ? scale * 1.25 : scale / 1.25);
    return;
  }
  // Fields that take letters keep them; the slider keeps its arrows alone, so that j and k work after it was moved.
  const { tagName, type } = event.target;
  const typing = tagName === "SELECT" || (tagName === "INPUT" && !["checkbox", "range"].includes(type));
  const sliding = type === "range" && event.key.startsWith("Arrow");
  const pressing = tagName === "BUTTON" && event.key === "Enter";
  if (typing || sliding || pressing || !KEYS[event.key]) return;
  event.preventDefault();
  KEYS[event.key]();
});

for (const [id, choices] of [["filter", FILTERS], ["order", ORDERS]]) {
  byId(id).append(...Object.entries(choices).map(([value, [label]]) => el("option", { value }, label)));
  byId(id).addEventListener("change", () => refresh(true));
}
byId("search").addEventListener("input", () => refresh());
byId("step").max = steps.length;
byId("step").addEventListener("input", () => refresh(true));
byId("score").addEventListener("input", setThreshold);
byId("score-box").hidden = !records.some((record) => record.pred.some((object) => object.score !== null));
byId("save-list").addEventListener("click", saveList);
byId("grid-button").addEventListener("click", () => switchGrid());
byId("grid").addEventListener("click", (event) => {
  const chosen = event.target.closest(".tile");
  if (!chosen) return;
  current = records[Number(chosen.dataset.number)];
  switchGrid(false);
});
byId("stages").addEventListener("click", (event) => {
  const box = event.target.closest(".stage");
  if (box) enlarge(runOf(box));
});
byId("zoomed").addEventListener("wheel", (event) => {
  event.preventDefault();
  scaleTo(event.deltaY < 0 ? scale * 1.15 : scale / 1.15);
}, { passive: false });
byId("zoom-in").addEventListener("click", () => scaleTo(scale * 1.25));
byId("zoom-out").addEventListener("click", () => scaleTo(scale / 1.25));
byId("zoom-full").addEventListener("click", () => scaleTo(1));
byId("zoom-close").addEventListener("click", () => byId("zoom").close());
byId("step-box").hidden = steps.length < 2;
byId("choices").hidden = !records.length;
byId("grid-button").hidden = !records.length;
document.querySelector("main").classList.toggle("no-records", !records.length);
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
byId("curves").addEventListener("click", toStep);
byId("zoomed").addEventListener("mouseover", over);
byId("zoomed").addEventListener("mouseout", out);
window.addEventListener("hashchange", () => {
  const record = linked();
  if (record !== null && record !== current) show(record);
});

byId("title").textContent = data.title;
byId("title").title = data.title;
byId("following").hidden = !data.follow;
byId("notes").replaceChildren(...data.notes.map((note) => el("p", {}, note)));
drawCurves();
current = linked();
refresh();
if (data.follow) {
  // The address names the record, so it is still shown after the page was loaded again.
  window.setInterval(async () => {
    const answer = await fetch("version").catch(() => null);
    byId("following").textContent = answer?.ok ? "following" : "server stopped";
    if (answer?.ok && (await answer.text()) !== data.version && !byId("zoom").open) window.location.reload();
  }, 3000);
}
document.documentElement.dataset.readyMs = String(Math.round(performance.now() - began));
