"use strict";
// Everything from the data reaches the page by textContent or setAttribute: it is text, whatever it looks like.
(() => {
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

  const records = data.records.map((record, number) => ({
    ...record,
    number,
    missed: record.gt.filter((object) => object.partner === null).length,
    wrong: record.annotated ? record.pred.filter((object) => object.partner === null).length : 0,
    numDropped: Object.values(record.dropped).reduce((sum, count) => sum + count, 0),
    words: [record.sample_id, ...record.gt.map((o) => o.desc), ...record.pred.map((o) => o.desc)]
      .join("\n").toLowerCase(),
  }));
  const steps = [...new Set(records.map((record) => record.step).filter((step) => step !== null))]
    .sort((a, b) => a - b);

  const FILTERS = {
    all: ["everything", () => true],
    missed: ["with missed objects (FN)", (r) => r.missed > 0],
    wrong: ["with wrong predictions (FP)", (r) => r.wrong > 0],
    truncated: ["truncated", (r) => r.truncated],
    repeat: ["repeat-terminated", (r) => r.repeat_terminated],
    dropped: ["with dropped entries", (r) => r.numDropped > 0],
    perfect: ["perfect", (r) => r.annotated && !r.missed && !r.wrong && !r.numDropped && !r.truncated],
  };
  const ORDERS = {
    run: ["of the run", (a, b) => a.number - b.number],
    loss: ["worst loss", (a, b) => (b.loss ?? -1) - (a.loss ?? -1)],
    missed: ["most missed", (a, b) => b.missed - a.missed],
    wrong: ["most wrong", (a, b) => b.wrong - a.wrong],
    dropped: ["most dropped", (a, b) => b.numDropped - a.numDropped],
  };

  let shown = [];
  let current = null;

  const round = (value) => (value === null || value === undefined ? "–" : Number(value.toPrecision(4)).toString());

  // ---- the list

  const listed = () => {
    const wanted = byId("search").value.trim().toLowerCase();
    const step = Number(byId("step").value);
    const keep = FILTERS[byId("filter").value][1];
    return records
      .filter((r) => keep(r) && (!step || r.step === steps[step - 1]) && (!wanted || r.words.includes(wanted)))
      .sort(ORDERS[byId("order").value][1]);
  };

  const refresh = () => {
    const step = Number(byId("step").value);
    byId("step-name").textContent = step ? String(steps[step - 1]) : "all";
    shown = listed();
    const rows = shown.map((record) => {
      const facts = [
        record.step === null ? "" : `step ${record.step}`,
        record.annotated ? `${record.gt.length} objects` : `${record.pred.length} predicted`,
        record.missed ? `${record.missed} FN` : "",
        record.wrong ? `${record.wrong} FP` : "",
        record.loss === null ? "" : `loss ${round(record.loss)}`,
      ];
      const row = el("button", { type: "button", "data-number": record.number }, record.sample_id,
        el("span", { class: "sub" }, facts.filter(Boolean).join(" · ")));
      return row;
    });
    const message = records.length ? "nothing matches; change the filter or the search" : "no records";
    byId("list").replaceChildren(...(rows.length ? rows : [el("p", {}, message)]));
    if (!shown.includes(current)) current = shown[0] ?? null;
    show(current);
  };

  const move = (by) => {
    if (!shown.length) return;
    const at = Math.min(shown.length - 1, Math.max(0, shown.indexOf(current) + by));
    show(shown[at]);
  };

  // ---- one record

  const show = (record) => {
    current = record;
    for (const row of byId("list").querySelectorAll("[aria-current]")) row.removeAttribute("aria-current");
    byId("record").hidden = record === null;
    drawMarkers();
    if (record === null) return;
    const row = byId("list").querySelector(`[data-number="${record.number}"]`);
    if (row) {
      row.setAttribute("aria-current", "true");
      row.scrollIntoView({ block: "nearest" });
    }
    byId("name").textContent = record.sample_id;
    byId("badges").replaceChildren(...badges(record));
    byId("stage").replaceChildren(...picture(record));
    byId("facts").replaceChildren(...facts(record));
    tokens(byId("rollout"), record.rollout, record.text);
    tokens(byId("target"), record.target, "");
    byId("target-title").hidden = byId("target").hidden = record.target === null;
    byId("token-bar").hidden = record.target === null;
  };

  const badges = (record) => {
    const all = [
      [record.step === null ? "" : `step ${record.step}`, false],
      [`${record.width} × ${record.height}`, false],
      [record.annotated ? `${record.gt.length} annotated` : "not annotated", false],
      [`${record.pred.length} predicted`, false],
      [record.missed ? `${record.missed} missed` : "", true],
      [record.wrong ? `${record.wrong} wrong` : "", true],
      [record.truncated ? "truncated" : "", true],
      [record.repeat_terminated ? "repeat-terminated" : "", true],
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

  const picture = (record) => {
    const image = images[record.image];
    const ground = image.src
      ? el("img", { src: image.src, alt: "" })
      : el("div", { class: "lost" }, `image not shown: ${image.error}`);
    if (!image.src) ground.style.aspectRatio = `${record.width} / ${record.height}`;
    const overlay = shape("svg", { viewBox: "0 0 999 999", preserveAspectRatio: "none" });
    record.pred.forEach((object) => {
      if (object.partner === null) return;
      const [[x1, y1], [x2, y2]] = [centre(object), centre(record.gt[object.partner])];
      overlay.append(shape("line", { class: "link", x1, y1, x2, y2 }));
    });
    const outlines = [["gt", "found", "missed"], ["pred", "right", "wrong"]].flatMap(([side, good, bad]) =>
      record[side].map((object, number) => {
        const state = object.partner === null && record.annotated ? bad : good;
        return [extent(object), shape("polygon", {
          class: `${side} ${state}`, points: points(object).map((p) => p.join(",")).join(" "), tabindex: 0,
          "data-side": side, "data-index": number, "aria-label": says(record, side, number),
        })];
      }));
    // The largest first: what lies inside another can then be pointed at.
    outlines.sort((a, b) => b[0] - a[0]);
    overlay.append(...outlines.map(([, outline]) => outline));
    byId("stage").style.maxWidth = `min(760px, ${(58 * record.width) / record.height}vh)`;
    return [ground, overlay];
  };
  const extent = (object) => {
    const all = points(object);
    const side = (axis) => {
      const values = all.map((point) => point[axis]);
      return Math.max(...values) - Math.min(...values);
    };
    return side(0) * side(1);
  };

  const says = (record, side, number) => {
    const object = record[side][number];
    if (side === "gt") {
      const found = object.partner === null ? "missed" : `found, IoU ${round(record.pred[object.partner].iou)}`;
      return `ground truth: ${object.desc} · ${found}`;
    }
    const matched = object.partner === null
      ? "unmatched" : `matches ${record.gt[object.partner].desc}, IoU ${round(object.iou)}`;
    const score = object.score === null ? "" : ` · score ${round(object.score)}`;
    return `${object.name}: ${object.desc} · ${record.annotated ? matched : "not annotated"}${score}`;
  };

  const facts = (record) => {
    const table = (title, rows) => el("table", {}, el("caption", {}, title),
      ...rows.map(([name, value]) => el("tr", {}, el("th", {}, name), el("td", {}, value))));
    const parts = [];
    const dropped = Object.entries(record.dropped);
    if (dropped.length) parts.push(table("dropped entries, by reason", dropped.map(([k, v]) => [k, String(v)])));
    if (record.loss_by_role) {
      const rows = Object.entries(record.loss_by_role).map(([role, loss]) => [role, round(loss)]);
      parts.push(table("mean loss, by role", rows));
    }
    return parts;
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
    box.replaceChildren(...nodes);
  };

  const legend = () => {
    const roles = ["PREFIX_MASKED", "PREFIX_STRUCT", "PREFIX_DESC", "PREFIX_COORD", "TAIL_STRUCT", "TAIL_DESC",
      "TAIL_COORD", "CLOSE", "EOS", "BEHIND_CUT"];
    const byLoss = byId("colour").value === "loss";
    byId("record").classList.toggle("by-loss", byLoss);
    const names = byLoss ? [] : roles.map((role) => el("span", { class: role }, role));
    byId("legend").replaceChildren(...names);
  };

  // ---- curves

  const PREFERRED = ["loss", "eval_rollout/f1", "eval_rollout/AP", "rollout/match_rate", "rollout/precision",
    "rollout/parse_truncated_rate", "rollout/duplicate_rate", "learning_rate"];
  const drawCurves = () => {
    const names = Object.keys(data.curves).sort((a, b) => {
      const rank = (name) => (PREFERRED.includes(name) ? PREFERRED.indexOf(name) : PREFERRED.length);
      return rank(a) - rank(b) || a.localeCompare(b);
    });
    byId("curves").hidden = !names.length;
    byId("curves").replaceChildren(...names.slice(0, 40).map(curve));
  };
  const curve = (name) => {
    const line = data.curves[name];
    const [xs, ys] = [line.map((point) => point[0]), line.map((point) => point[1])];
    const [left, right, low, high] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
    const x = (value) => (100 * (value - left)) / (right - left || 1);
    const y = (value) => 38 - (36 * (value - low)) / (high - low || 1);
    const chart = shape("svg", { viewBox: "0 0 100 40", preserveAspectRatio: "none", "data-curve": name,
      "data-left": left, "data-right": right });
    chart.append(shape("polyline", { points: line.map(([a, b]) => `${x(a)},${y(b)}`).join(" ") }));
    const last = `${name}: ${round(ys[ys.length - 1])} (${round(low)} … ${round(high)})`;
    return el("figure", {}, chart, el("figcaption", {}, last));
  };
  const drawMarkers = () => {
    for (const chart of byId("curves").querySelectorAll("svg")) {
      chart.querySelector("line")?.remove();
      if (current === null || current.step === null) continue;
      const [left, right] = [Number(chart.dataset.left), Number(chart.dataset.right)];
      const x = (100 * (current.step + 1 - left)) / (right - left || 1);
      if (x >= 0 && x <= 100) chart.append(shape("line", { x1: x, x2: x, y1: 0, y2: 40 }));
    }
  };

  // ---- hover

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
  const onShape = (event) => {
    const { side, index } = event.target.dataset;
    const object = current[side][Number(index)];
    say(says(current, side, Number(index)), event);
    const other = side === "gt" ? "pred" : "gt";
    byId("stage").querySelector(`[data-side="${other}"][data-index="${object.partner}"]`)?.classList.add("lit");
  };
  const onToken = (event) => {
    const { at, loss } = event.target.dataset;
    const role = event.target.className;
    const mean = current.loss_by_role?.[role];
    say([`token ${at}`, role, loss === undefined ? "no loss" : `loss ${round(Number(loss))}`,
      mean === undefined ? "" : `mean of its role ${round(mean)}`].filter(Boolean).join(" · "), event);
  };
  const over = (event) => {
    if (event.target.dataset?.side) onShape(event);
    else if (event.target.dataset?.at) onToken(event);
  };
  const out = () => {
    tip.hidden = true;
    for (const node of byId("stage").querySelectorAll(".lit")) node.classList.remove("lit");
  };

  // ---- controls

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
    g: () => flip("gt"), p: () => flip("pred"), l: () => flip("links"), c: switchColour,
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
    const typing = ["INPUT", "SELECT"].includes(event.target.tagName) && event.target.type !== "checkbox";
    if (typing || !KEYS[event.key]) return;
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
  byId("theme").addEventListener("click", switchTheme);
  byId("help-button").addEventListener("click", switchHelp);
  byId("colour").addEventListener("change", legend);
  for (const name of ["gt", "pred", "links"]) byId(`show-${name}`).addEventListener("change", () => toggle(name));
  byId("list").addEventListener("click", (event) => {
    const row = event.target.closest("button");
    if (row) show(records[Number(row.dataset.number)]);
  });
  for (const [name, react] of [["mouseover", over], ["focusin", over], ["mouseout", out], ["focusout", out]]) {
    byId("record").addEventListener(name, react);
  }

  byId("title").textContent = data.title;
  byId("title").title = data.title;
  byId("notes").replaceChildren(...data.notes.map((note) => el("p", {}, note)));
  drawCurves();
  legend();
  refresh();
  document.documentElement.dataset.readyMs = String(Math.round(performance.now() - began));
})();
