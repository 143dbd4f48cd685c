// Draws the report's charts as SVG from the JSON in the page, and redraws them when the width changes.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");
  const SVG = document.getElementById("blank").namespaceURI;
  const ACTIVITY = { generate: 0, train: 1, "send weights": 2, "send bucket": 2, probe: 2, evaluate: 3, save: 4, collect: 5, "wait for rollouts": 6 };
  const cursors = [];

  // Small helpers

  function el(name, attributes, parent, text) {
    const node = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    if (parent) parent.appendChild(node);
    return node;
  }

  const colour = (index) => `var(--c${index % 8})`;
  const escape = (text) => String(text).replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
  const known = (values) => values.filter((v) => v !== null);

  function format(value) {
    const size = Math.abs(value);
    if (value === 0) return "0";
    if (size >= 1e9) return trim(value / 1e9) + "B";
    if (size >= 1e6) return trim(value / 1e6) + "M";
    if (size >= 1e4) return trim(value / 1e3) + "k";
    if (size < 1e-3) return value.toExponential(1).replace(".0e", "e").replace("-", "\u2212").replace("e-", "e\u2212");
    return trim(value);
  }

  function trim(value) {
    const text = Math.abs(value) >= 100 ? value.toFixed(0) : value.toPrecision(3);
    return (text.includes(".") ? text.replace(/\.?0+$/, "") : text).replace("-", "\u2212");
  }

  function ticks(low, high, count) {
    const raw = (high - low) / Math.max(count, 1);
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
    const out = [];
    for (let t = Math.ceil(low / step - 1e-6) * step; t <= high + step * 1e-6; t += step) out.push(Math.abs(t) < step * 1e-6 ? 0 : t);
    return out;
  }

  function logTicks(low, high) {
    const out = [];
    for (let p = Math.ceil(Math.log10(low) - 1e-9); p <= Math.log10(high) + 1e-9; p++) out.push(10 ** p);
    const stride = Math.ceil(out.length / 5);
    return out.filter((_, i) => i % stride === 0);
  }

  // Frame: axes, grid, the cursor, and the tooltip that follows it

  function frame(chart, plot, height, domain, left, yTicks) {
    plot.replaceChildren();
    const width = Math.max(plot.clientWidth, 220);
    const svg = el("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": chart.title }, plot);
    const area = { left, right: width - 10, top: 22, bottom: height - 26 };
    const steps = chart.steps;
    const pad = chart.kind === "lines" ? 0 : 0.5;
    const first = steps[0] - pad, last = Math.max(steps[steps.length - 1] + pad, first + 1);
    const x = (step) => area.left + ((step - first) / (last - first)) * (area.right - area.left);
    const scale = chart.log ? Math.log : (v) => v;
    const [low, high] = domain.map(scale);
    const y = (value) => area.bottom - ((scale(value) - low) / (high - low)) * (area.bottom - area.top);
    for (const t of yTicks) {
      el("line", { class: "gridline", x1: area.left, x2: area.right, y1: y(t), y2: y(t) }, svg);
      el("text", { x: area.left - 8, y: y(t) + 4, "text-anchor": "end" }, svg, format(t));
    }
    el("text", { class: "unit", x: 0, y: 11 }, svg, chart.unit);
    xAxis(svg, area, x, first + pad, last - pad);
    return { svg, area, x, y, width };
  }

  function xAxis(svg, area, x, first, last) {
    el("line", { class: "axis", x1: area.left, x2: area.right, y1: area.bottom, y2: area.bottom }, svg);
    const room = Math.floor((area.right - area.left) / 70);
    const marks = ticks(first, Math.max(last, first + 1), room).filter((t) => Number.isInteger(t) && t <= last);
    for (const t of marks) {
      el("text", { x: x(t), y: area.bottom + 18, "text-anchor": "middle" }, svg, format(t));
    }
    el("text", { class: "unit", x: 0, y: area.bottom + 18 }, svg, "step");
  }

  function follow(chart, plot, view, describe) {
    const line = el("line", { class: "cursor", y1: view.area.top, y2: view.area.bottom }, view.svg);
    cursors.push({ plot, steps: chart.steps, line, x: view.x });
    plot.onpointermove = (event) => {
      const box = plot.getBoundingClientRect();
      const at = (event.clientX - box.left) * (view.width / box.width);
      const index = nearest(chart.steps, at, view.x);
      showCursors(chart.steps[index]);
      showTip(event, `<b>step ${chart.steps[index]}</b>` + describe(index, event));
    };
    plot.onpointerleave = hide;
  }

  function nearest(steps, at, x) {
    let best = 0;
    steps.forEach((step, i) => { if (Math.abs(x(step) - at) < Math.abs(x(steps[best]) - at)) best = i; });
    return best;
  }

  function showCursors(step) {
    for (const { steps, line, x } of cursors) {
      const inside = step >= steps[0] && step <= steps[steps.length - 1];
      line.style.visibility = inside ? "visible" : "hidden";
      if (inside) { line.setAttribute("x1", x(step)); line.setAttribute("x2", x(step)); }
    }
  }

  function showTip(event, content) {
    tip.innerHTML = content;
    tip.style.visibility = "visible";
    const right = event.clientX + 16 + tip.offsetWidth < window.innerWidth;
    const below = event.clientY + 16 + tip.offsetHeight < window.innerHeight;
    tip.style.left = Math.max(4, right ? event.clientX + 16 : event.clientX - 12 - tip.offsetWidth) + "px";
    tip.style.top = Math.max(4, below ? event.clientY + 16 : event.clientY - 12 - tip.offsetHeight) + "px";
  }

  function hide() {
    tip.style.visibility = "hidden";
    for (const { line } of cursors) line.style.visibility = "hidden";
  }

  const tipRow = (c, label, value) => `<div><span><i style="background:${c}"></i>${escape(label)}</span><b>${value}</b></div>`;

  function legend(card, items) {
    card.querySelector(".legend").innerHTML = items.map(({ label, paint, dashed, block, value }) => {
      const mark = block
        ? `<svg width="11" height="11"><rect width="11" height="11" rx="2.5" style="fill:${paint}"/></svg>`
        : `<svg width="18" height="8"><line x1="0" x2="18" y1="4" y2="4" stroke-width="2.5" style="stroke:${paint}"${dashed ? ' stroke-dasharray="5 3"' : ""}/></svg>`;
      return `<span>${mark}${escape(label)}${value === undefined ? "" : ` <b>${value}</b>`}</span>`;
    }).join("");
  }

  // Lines

  function drawLines(chart, card) {
    const plot = card.querySelector(".plot");
    const domain = lineDomain(chart);
    const marks = chart.log ? logTicks(...domain) : ticks(...domain, 5);
    const view = frame(chart, plot, 216, domain, axisWidth(marks), marks);
    for (const series of chart.series) if (series.band) drawBand(series, chart.steps, view);
    for (const series of chart.series) drawSeries(series, chart.steps, view);
    legend(card, chart.series.map((s) => ({ label: s.label, paint: colour(s.colour), dashed: s.dashed, value: format(known(s.values).pop()) })));
    follow(chart, plot, view, (i) => chart.series
      .filter((s) => s.values[i] !== null)
      .map((s) => tipRow(colour(s.colour), s.label, format(s.values[i]))).join(""));
  }

  function lineDomain(chart) {
    const values = known(chart.series.flatMap((s) => [...s.values, ...(s.band ? s.band.flat() : [])]));
    let low = Math.min(...values), high = Math.max(...values);
    if (chart.log) return [10 ** Math.floor(Math.log10(low)), 10 ** Math.ceil(Math.log10(high) + 1e-9)];
    if (chart.yMin !== null) low = Math.min(low, chart.yMin);
    if (chart.yMax !== null) high = Math.max(high, chart.yMax);
    if (high - low < 1e-12) { if (high !== chart.yMax) high += Math.abs(high) * 0.05 || 1; low = chart.yMin === null ? low - (Math.abs(low) * 0.05 || 1) : low; }
    const marks = ticks(low, high, 5);
    const gap = marks.length > 1 ? marks[1] - marks[0] : high - low;
    if (chart.yMin === null || low < chart.yMin) low = Math.floor(low / gap + 1e-6) * gap;
    if (chart.yMax === null || high > chart.yMax) high = Math.ceil(high / gap - 1e-6) * gap;
    return [low, high];
  }

  const axisWidth = (marks) => 16 + 7 * Math.max(...marks.map((t) => format(t).length), 2);

  function path(steps, values, view) {
    let out = "";
    values.forEach((v, i) => { if (v !== null) out += `${out ? "L" : "M"}${view.x(steps[i]).toFixed(1)} ${view.y(v).toFixed(1)}`; });
    return out;
  }

  function drawSeries(series, steps, view) {
    const paint = `stroke:${colour(series.colour)}`;
    const line = (values, width, opacity) => el("path", {
      d: path(steps, values, view), fill: "none", "stroke-width": width, "stroke-linejoin": "round", "stroke-linecap": "round",
      style: paint, "stroke-opacity": opacity, ...(series.dashed ? { "stroke-dasharray": "5 4" } : {}),
    }, view.svg);
    const count = known(series.values).length;
    const average = series.smooth && count >= 30;
    line(series.values, average ? 1.2 : 2, average ? 0.35 : 1);
    if (average) line(smoothed(series.values, count), 2.4, 1);
    if (count <= 16) series.values.forEach((v, i) => {
      if (v !== null) el("circle", { cx: view.x(steps[i]), cy: view.y(v), r: 3, style: `fill:${colour(series.colour)}` }, view.svg);
    });
  }

  // Mean over a centred window, so the average does not lag behind its values.
  function smoothed(values, count) {
    const reach = Math.max(2, Math.round(count / 30));
    return values.map((value, i) => {
      const near = known(values.slice(Math.max(0, i - reach), i + reach + 1));
      return value === null ? null : near.reduce((a, b) => a + b, 0) / near.length;
    });
  }

  function drawBand(series, steps, view) {
    const [low, high] = series.band;
    const inside = steps.map((_, i) => i).filter((i) => low[i] !== null && high[i] !== null);
    const top = inside.map((i) => `${view.x(steps[i]).toFixed(1)} ${view.y(high[i]).toFixed(1)}`);
    const bottom = inside.reverse().map((i) => `${view.x(steps[i]).toFixed(1)} ${view.y(low[i]).toFixed(1)}`);
    el("path", { d: `M${top.concat(bottom).join("L")}Z`, "fill-opacity": 0.15, style: `fill:${colour(series.colour)}` }, view.svg);
  }

  // Stacked bars

  function drawStack(chart, card) {
    const plot = card.querySelector(".plot");
    const totals = chart.steps.map((_, i) => chart.series.reduce((sum, s) => sum + (s.values[i] || 0), 0));
    const high = Math.max(...totals, 1e-9);
    const marks = ticks(0, high, 5);
    const view = frame(chart, plot, 216, [0, high * 1.02], axisWidth(marks), marks);
    const slot = (view.area.right - view.area.left) / chart.steps.length;
    const width = Math.min(48, slot > 4 ? slot - Math.min(2, slot * 0.25) : slot + 0.3);
    chart.steps.forEach((step, i) => {
      let below = 0;
      for (const series of chart.series) {
        const value = series.values[i] || 0;
        if (value <= 0) continue;
        const top = view.y(below + value);
        el("rect", { x: view.x(step) - width / 2, y: top, width, height: Math.max(view.y(below) - top, 0), style: `fill:${colour(series.colour)}` }, view.svg);
        below += value;
      }
    });
    legend(card, chart.series.map((s) => ({ label: s.label, paint: colour(s.colour), block: true })));
    follow(chart, plot, view, (i) => [...chart.series].reverse()
      .filter((s) => s.values[i])
      .map((s) => tipRow(colour(s.colour), s.label, format(s.values[i]))).join("") + tipRow("transparent", "total", format(totals[i])));
  }

  // Heat map, one row a layer

  function drawHeat(chart, card) {
    const plot = card.querySelector(".plot");
    const rowHeight = Math.max(4, Math.min(42, Math.floor(216 / chart.layers.length)));
    const lowest = Math.min(...known(chart.values.flat()));
    const floor = Math.min(0.95, Math.floor(lowest * 20) / 20);
    const view = frame(chart, plot, rowHeight * chart.layers.length + 48, [0, 1], 40, []);
    const slot = (view.area.right - view.area.left) / chart.steps.length;
    const stride = Math.ceil(14 / rowHeight);
    chart.layers.forEach((layer, row) => {
      const top = view.area.top + row * rowHeight;
      if (row % stride === 0) el("text", { x: 32, y: top + rowHeight / 2 + 4, "text-anchor": "end" }, view.svg, layer);
      chart.steps.forEach((step, i) => {
        const value = chart.values[row][i];
        if (value === null) return;
        const share = Math.round(100 * Math.max(0, Math.min(1, (value - floor) / (1 - floor))));
        const paint = `fill:color-mix(in oklab, var(--heat-high) ${share}%, var(--heat-low))`;
        el("rect", { x: view.area.left + i * slot, y: top, width: slot + 0.3, height: rowHeight > 10 ? rowHeight - 1 : rowHeight + 0.3, style: paint }, view.svg);
      });
    });
    card.querySelector(".legend").innerHTML = `<span>${floor.toFixed(2)}<span class="ramp"></span>1.00</span><span>lowest seen <b>${lowest.toFixed(3)}</b></span>`;
    followHeat(chart, plot, view, slot, rowHeight);
  }

  function followHeat(chart, plot, view, slot, rowHeight) {
    const line = el("line", { class: "cursor", y1: view.area.top, y2: view.area.bottom }, view.svg);
    const middle = (step) => view.area.left + (nearest(chart.steps, step, (s) => s) + 0.5) * slot;
    cursors.push({ plot, steps: chart.steps, line, x: middle });
    plot.onpointermove = (event) => {
      const box = plot.getBoundingClientRect();
      const clamp = (v, n) => Math.max(0, Math.min(n - 1, v));
      const i = clamp(Math.floor((event.clientX - box.left - view.area.left) / slot), chart.steps.length);
      const row = clamp(Math.floor((event.clientY - box.top - view.area.top) / rowHeight), chart.layers.length);
      showCursors(chart.steps[i]);
      const value = chart.values[row][i];
      showTip(event, `<b>step ${chart.steps[i]}</b><div><span>layer ${chart.layers[row]}</span><b>${value === null ? "not recorded" : value.toFixed(4)}</b></div>`);
    };
    plot.onpointerleave = hide;
  }

  // Timeline of one step

  let shownStep = data.timeline.length - 1;

  function drawTimeline() {
    const card = document.getElementById("timeline");
    if (!card) return;
    const plot = card.querySelector(".plot");
    const chosen = data.timeline[shownStep];
    const slider = card.querySelector("input");
    slider.max = data.timeline.length - 1;
    slider.value = shownStep;
    card.querySelector("output").textContent = chosen.step;
    card.querySelector(".duration").textContent = `${format(chosen.seconds)} s` + (chosen.hidden ? `, ${chosen.hidden} more lanes not shown` : "");
    plot.replaceChildren();
    const width = Math.max(plot.clientWidth, 260), lane = 34, narrow = width < 560;
    const left = 12 + 7 * Math.max(...chosen.lanes.map((l) => l.name.length)), right = width - (narrow ? 46 : 76);
    const height = 30 + chosen.lanes.length * lane + 24;
    const svg = el("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `timeline of step ${chosen.step}` }, plot);
    const x = (seconds) => left + (seconds / chosen.seconds) * (right - left);
    el("text", { class: "unit", x: width, y: 12, "text-anchor": "end" }, svg, "idle");
    for (const t of ticks(0, chosen.seconds, narrow ? 3 : 8)) {
      el("line", { class: "gridline", x1: x(t), x2: x(t), y1: 20, y2: height - 24 }, svg);
      el("text", { x: x(t), y: height - 6, "text-anchor": "middle" }, svg, `${format(t)} s`);
    }
    const names = new Set();
    chosen.lanes.forEach((entry, row) => drawLane(entry, 24 + row * lane, { svg, x, left, right, width, lane, names, step: chosen.step }));
    legend(card, [...names].map((name) => ({ label: name, paint: activity(name), block: true })));
    plot.onpointerleave = hide;
  }

  const unnamed = [];
  function activity(name) {
    if (name in ACTIVITY) return colour(ACTIVITY[name]);
    if (!unnamed.includes(name)) unnamed.push(name);
    return colour(unnamed.indexOf(name) + 3);
  }

  function drawLane(entry, top, view) {
    el("text", { x: 0, y: top + 18 }, view.svg, entry.name);
    el("rect", { x: view.left, y: top + 2, width: view.right - view.left, height: view.lane - 10, rx: 3, style: "fill:var(--grid)" }, view.svg);
    for (const [name, start, end, step] of entry.spans) {
      view.names.add(name);
      const width = Math.max(view.x(end) - view.x(start), 1);
      const other = step !== view.step;
      const box = el("rect", { x: view.x(start), y: top + 2, width, height: view.lane - 10, rx: Math.min(3, width / 2), "fill-opacity": other ? 0.45 : 1, style: `fill:${activity(name)};stroke:var(--card);stroke-width:${width > 4 ? 1 : 0}` }, view.svg);
      box.onpointermove = (event) => showTip(event, `<b>${escape(name)}</b>` + tipRow("transparent", "step", step) + tipRow("transparent", "took", `${format(end - start)} s`) + tipRow("transparent", "began at", `${format(start)} s`));
      box.onpointerleave = hide;
      if (width > name.length * 7.5 + 12 && !other) el("text", { class: "inside", x: view.x(start) + 7, y: top + 18 }, view.svg, name);
    }
    if (entry.idle !== null) el("text", { x: view.width, y: top + 18, "text-anchor": "end" }, view.svg, `${Math.round(100 * entry.idle)}%`);
  }

  // Start

  const DRAW = { lines: drawLines, stack: drawStack, heat: drawHeat };
  let drawnWidth = 0;

  function drawAll() {
    if (window.innerWidth === drawnWidth) return;
    drawnWidth = window.innerWidth;
    cursors.length = 0;
    for (const chart of data.charts) DRAW[chart.kind](chart, document.getElementById(chart.id));
    drawTimeline();
  }

  function move(to) {
    shownStep = Math.max(0, Math.min(data.timeline.length - 1, to));
    drawTimeline();
  }

  const card = document.getElementById("timeline");
  if (card) {
    card.querySelector("input").oninput = (event) => move(Number(event.target.value));
    for (const button of card.querySelectorAll("button")) button.onclick = () => move(shownStep + Number(button.dataset.move));
  }
  window.addEventListener("resize", drawAll);
  drawAll();
})();
