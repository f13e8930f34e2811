// Draws the charts of a report from the data beside it. The page is complete without it, but for them.
"use strict";
const root = document.documentElement;
window.addEventListener("error", (event) => { root.dataset.error = event.message; });
window.addEventListener("unhandledrejection", (event) => { root.dataset.error = String(event.reason); });

const runs = JSON.parse(document.getElementById("data").textContent);
const shapes = ["circle", "rect", "triangle", "diamond", "roundRect", "arrow"];
const colour = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();

function write(value) {
  if (typeof value !== "number") return value === null || value === undefined ? "–" : String(value);
  const text = Number.isInteger(value) ? value.toLocaleString("en").replaceAll(",", "\u202f") : String(Number(value.toPrecision(6)));
  return text.replace("-", "−");
}

function element(kind, text) {
  const made = document.createElement(kind);
  if (text !== undefined) made.textContent = text;
  return made;
}

// Built from text nodes: what a trial's values contain can never become markup.
function card(title, rows) {
  const tip = element("div");
  tip.className = "tip";
  tip.append(element("b", title));
  const list = element("dl");
  for (const [name, value] of rows) list.append(element("dt", name), element("dd", write(value)));
  tip.append(list);
  return tip;
}

function describe(run, index) {
  const rows = run.labels.map((label, objective) => [label, run.rewards[objective][index]]);
  for (const p of run.parameters) {
    if (p.at[index] !== null) rows.push([p.name, p.kind === "category" ? p.categories[p.at[index]] : p.at[index]]);
  }
  if (run.regime[index] !== null) rows.push([run.regime_name ?? "regime", run.regimes[run.regime[index]]]);
  return card(run.titles ? run.titles[index] : `Trial ${run.number[index]}${run.cached[index] ? ", from the cache" : ""}`, rows);
}

function axis(more) {
  return {
    axisLine: { show: true, lineStyle: { color: colour("rule") } },
    axisTick: { show: false },
    splitLine: { show: false },
    ...more,
    axisLabel: { color: colour("muted"), fontSize: 12, hideOverlap: true, formatter: write, ...more.axisLabel },
    nameTextStyle: { color: colour("muted"), fontSize: 12, ...more.nameTextStyle },
  };
}

const lower = (run, objective) => Boolean(run.lower && run.lower[objective]);
// Beyond the end of an axis that leaves out a few very bad trials.
const beyond = (run, objective, y) => run.floors[objective] !== null && (lower(run, objective) ? y > run.floors[objective] : y < run.floors[objective]);
const rewardAxis = (run, objective, more) => axis({
  type: "value", scale: true, [lower(run, objective) ? "max" : "min"]: run.floors[objective] ?? undefined, axisLine: { show: false },
  splitLine: { show: true, lineStyle: { color: colour("rule"), opacity: 0.6 } }, ...more,
});

function base(more) {
  return {
    animation: false,
    textStyle: { fontFamily: getComputedStyle(document.body).fontFamily },
    grid: { left: 6, right: 14, top: 12, bottom: 6, outerBoundsMode: "same", outerBoundsContain: "axisLabel" },
    tooltip: {
      trigger: "item", confine: true, formatter: (at) => (at.data && at.data.tip ? at.data.tip() : ""),
      backgroundColor: colour("paper"), borderColor: colour("rule"), textStyle: { color: colour("ink") },
    },
    ...more,
  };
}

const named = (name) => ({ name: name.length > 60 ? `${name.slice(0, 59)}…` : name, nameLocation: "middle", nameGap: 30 });

// The points of some trials: in range, fallen below the axis (drawn at its edge), and those of the answer.
function points(run, indexes, objective, x, small) {
  const down = !lower(run, objective), answer = new Set(run.answer), apart = run.regimes.length > 1 && run.regimes.length <= 6;
  const size = small ? 5 : indexes.length > 1000 ? 4 : 6;
  const groups = new Map(), below = [], top = [];
  for (const index of indexes) {
    const at = x(index), y = run.rewards[objective][index];
    if (at === null) continue;
    const point = { value: [at, y], tip: () => describe(run, index) };
    if (answer.has(index)) top.push(point);
    else if (beyond(run, objective, y)) below.push({ ...point, value: [at, down ? 0 : 1] });
    else {
      if (run.cached[index]) point.itemStyle = { color: "transparent", borderWidth: 1.2, borderColor: colour(apart ? `c${run.regime[index] ?? 0}` : "point") };
      const group = apart ? run.regime[index] ?? 0 : -1;
      if (!groups.has(group)) groups.set(group, []);
      groups.get(group).push(point);
    }
  }
  const dense = indexes.length > 300 ? 0.45 : 0.7;
  const series = [...groups].map(([group, data]) => ({
    type: "scatter", data, symbolSize: size, symbol: group < 0 ? "circle" : shapes[group],
    itemStyle: { color: colour(group < 0 ? "point" : `c${group}`), opacity: dense }, z: 2,
  }));
  if (below.length) {
    series.push({
      type: "scatter", data: below, symbol: "triangle", symbolRotate: down ? 180 : 0, symbolSize: 7, symbolOffset: [0, down ? -5 : 5],
      yAxisIndex: 1, itemStyle: { color: colour("point"), opacity: 0.8 }, z: 2,
    });
  }
  series.push({
    type: "scatter", data: top, symbol: "diamond", symbolSize: (small ? 10 : 13) - (top.length > 6 ? 3 : 0), z: 5,
    itemStyle: { color: colour("mark"), borderColor: colour("ink"), borderWidth: 1 },
  });
  return series;
}

// A second, hidden axis from 0 to 1 gives the marks at the lower edge their place.
const edge = { type: "value", min: 0, max: 1, show: false };
const every = (run) => run.number.map((_, index) => index);
const sketch = (run) => [...new Set([...run.sketch, ...run.answer])];

const charts = {
  progress(run, figure) {
    const objective = Number(figure.dataset.objective);
    const noun = run.noun ?? (run.live ? "step" : "trial");
    const lines = run.lines[objective].map((line) => ({
      type: "line", step: run.live ? false : "end", data: line.steps, symbol: "none", silent: true, z: 3,
      lineStyle: { width: 2, color: colour(line.regime !== null ? `c${line.regime}` : run.live && run.regimes.length > 1 ? "ink" : "line") },
    }));
    const ticks = run.failed.map(([number, outcome, reason]) => ({
      value: [number, 0], tip: () => card(`${noun[0].toUpperCase()}${noun.slice(1)} ${number}: ${outcome}`, [["why", reason || "–"]]),
    }));
    return base({
      grid: { left: 6, right: 14, top: 12, bottom: 28, outerBoundsMode: "same", outerBoundsContain: "axisLabel" },
      xAxis: axis({ type: "value", min: 0, max: Math.max(run.last, 1), minInterval: 1, ...named(noun), nameGap: 26 }),
      yAxis: [rewardAxis(run, objective, {}), edge],
      series: [
        ...points(run, every(run), objective, (index) => run.number[index], false),
        ...lines,
        { type: "scatter", data: ticks, symbol: "rect", symbolSize: [1.6, 11], symbolOffset: [0, -5.5], yAxisIndex: 1, itemStyle: { color: colour("ink"), opacity: ticks.length > 100 ? 0.35 : 0.75 }, z: 1 },
      ],
    });
  },
  // The mean of each group, and the band from its worst to its best rollout.
  groups(run) {
    const found = run.groups;
    const tip = ([first, last, mean, low, high]) => card(first === last ? `Group ${first}` : `Groups ${first}–${last}`, [["mean", mean], ["worst", low], ["best", high]]);
    const line = (data, more) => ({ type: "line", data, symbol: "none", silent: true, lineStyle: { width: 0 }, ...more });
    return base({
      grid: { left: 6, right: 14, top: 12, bottom: 28, outerBoundsMode: "same", outerBoundsContain: "axisLabel" },
      xAxis: axis({ type: "value", min: found[0][0], max: found[found.length - 1][1], minInterval: 1, ...named("group"), nameGap: 26 }),
      yAxis: rewardAxis(run, 0, { min: undefined, splitNumber: 4 }),
      series: [
        line(found.map((g) => [g[0], g[3]]), { stack: "band", stackStrategy: "all" }),
        line(found.map((g) => [g[0], g[4] - g[3]]), { stack: "band", stackStrategy: "all", areaStyle: { color: colour("point"), opacity: 0.18 } }),
        line(found.map((g) => [g[0], g[2]]), { lineStyle: { width: 1.5, color: colour("point") } }),
        { type: "scatter", symbolSize: 5, itemStyle: { color: colour("point") }, data: found.map((g) => ({ value: [g[0], g[2]], tip: () => tip(g) })) },
      ],
    });
  },
  // Numbers of a training by step. A band is an interval where points are marked, otherwise from lowest to highest.
  curve(run, figure) {
    const found = run.curves[Number(figure.dataset.which)], large = figure.classList.contains("large");
    const tip = (line, [first, mean, low, high, last]) => card(
      `${run.unit === "trial" ? "Trial" : "Step"}${first === last ? ` ${first}` : `s ${first}–${last}`}${line.name ? `, ${line.name}` : ""}`,
      [[line.name && !large ? line.name : found.title, mean], ...(low === high ? [] : [[line.marked ? "95 %" : "range", `${write(low)} … ${write(high)}`]])],
    );
    const series = found.lines.flatMap((line, place) => {
      const own = colour(`c${place}`), band = { type: "line", symbol: "none", silent: true, lineStyle: { width: 0 }, stack: `band${place}`, stackStrategy: "all" };
      const wide = line.rows.some((row) => row[2] !== row[3]);
      return [
        ...(wide ? [
          { ...band, data: line.rows.map((row) => [row[0], row[2]]) },
          { ...band, data: line.rows.map((row) => [row[0], row[3] - row[2]]), areaStyle: { color: own, opacity: 0.18 } },
        ] : []),
        { type: "line", data: line.rows.map((row) => [row[0], row[1]]), symbol: "none", silent: true, z: 3, lineStyle: { width: line.marked ? 2.2 : 1.5, color: own } },
        {
          type: "scatter", z: 4, symbolSize: line.marked && line.rows.length < 60 ? 7 : 6,
          itemStyle: { color: own, opacity: line.marked && line.rows.length < 60 || line.rows.length === 1 ? 1 : 0 },
          emphasis: { itemStyle: { opacity: 1 } }, data: line.rows.map((row) => ({ value: [row[0], row[1]], tip: () => tip(line, row) })),
        },
      ];
    });
    const ticks = large ? run.skipped.map((step) => ({ value: [step, 0], tip: () => card(`Step ${step}`, [["", "changed nothing"]]) })) : [];
    return base({
      grid: { left: 6, right: 14, top: 12, bottom: large ? 28 : 6, outerBoundsMode: "same", outerBoundsContain: "axisLabel" },
      xAxis: axis({ type: "value", min: 0, max: Math.max(run.steps, 1), minInterval: 1, ...(large ? { ...named(run.unit ?? "step"), nameGap: 26 } : {}) }),
      yAxis: [axis({ type: "value", scale: true, splitNumber: large ? 5 : 3, axisLine: { show: false }, splitLine: { show: true, lineStyle: { color: colour("rule"), opacity: 0.6 } } }), edge],
      series: [...series, { type: "scatter", data: ticks, symbol: "rect", symbolSize: [1.6, 11], symbolOffset: [0, -5.5], yAxisIndex: 1, itemStyle: { color: colour("ink"), opacity: 0.75 }, z: 1 }],
    });
  },
  histogram(run, figure) {
    const found = run.histograms[Number(figure.dataset.which)];
    return base({
      xAxis: axis({ type: "category", data: found.from, axisLabel: { formatter: (text) => write(Number(text)) } }),
      yAxis: axis({ type: "value", splitNumber: 3, minInterval: 1, axisLine: { show: false }, splitLine: { show: true, lineStyle: { color: colour("rule"), opacity: 0.6 } } }),
      series: [{
        type: "bar", barCategoryGap: "8%", itemStyle: { color: colour("point"), opacity: 0.8 },
        data: found.counts.map((count, index) => ({ value: count, tip: () => card(`${found.name} ${found.names[index]}`, [["rollouts", count]]) })),
      }],
    });
  },
  parameter(run, figure) {
    const p = run.parameters[Number(figure.dataset.parameter)];
    if (p.kind === "category") return strip(run, figure, p.categories, p.means, (index) => p.at[index]);
    return base({
      xAxis: axis({ type: p.kind, scale: true, ...ends(p) }),
      yAxis: [rewardAxis(run, 0, { splitNumber: 3 }), edge],
      series: points(run, sketch(run), 0, (index) => p.at[index], true),
    });
  },
  regimes(run, figure) {
    return strip(run, figure, run.regimes, run.regime_means, (index) => run.regime[index]);
  },
  front(run, figure) {
    const x = Number(figure.dataset.x), y = Number(figure.dataset.y);
    const answer = new Set(run.answer), plain = [], top = [];
    for (const index of every(run)) {
      (answer.has(index) ? top : plain).push({ value: [run.rewards[x][index], run.rewards[y][index]], tip: () => describe(run, index) });
    }
    return base({
      grid: { left: 30, right: 14, top: 12, bottom: 28, outerBoundsMode: "same", outerBoundsContain: "axisLabel" },
      xAxis: rewardAxis(run, x, { ...named(run.labels[x]), nameGap: 26, axisLine: { show: true, lineStyle: { color: colour("rule") } } }),
      yAxis: rewardAxis(run, y, { ...named(run.labels[y]), nameGap: 12, nameMoveOverlap: true }),
      series: [
        { type: "scatter", data: plain, symbolSize: plain.length > 1000 ? 4 : 6, itemStyle: { color: colour("point"), opacity: plain.length > 300 ? 0.45 : 0.7 } },
        { type: "scatter", data: top, symbol: "diamond", symbolSize: 11, z: 5, itemStyle: { color: colour("mark"), borderColor: colour("ink"), borderWidth: 1 } },
      ],
    });
  },
};

// A logarithmic axis would reach out to whole powers of ten; it ends where the trials end.
function ends(p) {
  if (p.kind !== "log") return {};
  const used = p.at.filter((value) => value !== null);
  const low = used.reduce((a, b) => Math.min(a, b)), high = used.reduce((a, b) => Math.max(a, b));
  return {
    min: low / 1.08, max: high * 1.08, logBase: high / low < 100 ? 2 : 10,
    axisLabel: { showMinLabel: false, showMaxLabel: false },
  };
}

// One column for each category: trials shaken apart sideways by a fixed pattern, a bar at their mean.
function strip(run, figure, names, means, place) {
  const width = (figure.clientWidth - 50) / names.length;
  const fits = names.every((name) => name.length < 60 && name.split(" ").every((word) => word.length * 7.5 < width - 8));
  const shake = (index) => (((index * 0.618034) % 1) - 0.5) * 0.5;
  const at = (index) => (place(index) === null ? null : place(index) + shake(index));
  const bars = means.map((mean, column) => ({ value: [column, mean], tip: () => card(names[column], [["mean", mean]]) }));
  return base({
    xAxis: axis({
      type: "value", min: -0.5, max: names.length - 0.5, interval: 1,
      axisLabel: {
        customValues: names.map((_, column) => column), formatter: (column) => names[column] ?? "",
        width: Math.max(30, width - 8), lineHeight: 14, overflow: fits ? "break" : "truncate", hideOverlap: names.length > 8,
      },
    }),
    yAxis: [rewardAxis(run, 0, { splitNumber: 3 }), edge],
    series: [
      ...points(run, sketch(run), 0, at, true),
      {
        type: "scatter", data: bars.filter((bar) => bar.value[1] !== null && !beyond(run, 0, bar.value[1])), symbol: "rect",
        symbolSize: [Math.max(8, width / 2), 3], itemStyle: { color: colour("ink") }, z: 4,
      },
    ],
  });
}

// One axis per parameter and one for each objective; a line per trial, drawn without a chart library.
function parallel(run, figure) {
  const plot = figure.querySelector(".plot"), width = plot.clientWidth, height = plot.clientHeight, top = 34, bottom = 22, side = 50;
  const make = (kind, more, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
    for (const [name, value] of Object.entries(more)) made.setAttribute(name, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const scale = (values, log) => {
    const used = values.filter((value) => value !== null);
    const low = used.reduce((a, b) => Math.min(a, b)), high = used.reduce((a, b) => Math.max(a, b));
    const at = (value) => (high === low ? 0.5 : log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low));
    return { low, high, at };
  };
  const axes = run.parameters.slice(0, 11).map((p) => ({ name: p.name, values: p.at, names: p.kind === "category" ? p.categories : null, log: p.kind === "log" }));
  run.labels.forEach((label, objective) => {
    const bound = run.floors[objective];
    const clip = (value) => (beyond(run, objective, value) ? bound : value);
    axes.push({ name: label, values: run.rewards[objective].map(clip), names: null, flip: lower(run, objective) });
  });
  const svg = make("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "font-size": 12, fill: colour("muted") });
  axes.forEach((axis, place) => {
    axis.x = side + (place * (width - 2 * side)) / (axes.length - 1);
    axis.scale = axis.names ? { at: (value) => (axis.names.length < 2 ? 0.5 : value / (axis.names.length - 1)) } : scale(axis.values, axis.log);
    axis.y = (value) => { const at = axis.scale.at(value); return top + (axis.flip ? at : 1 - at) * (height - top - bottom); };
  });
  const answer = new Set(run.answer), last = axes[axes.length - run.labels.length];
  const indexes = [...new Set([...run.sketch.filter((_, at) => at % Math.ceil(run.sketch.length / 300) === 0), ...run.answer])];
  indexes.sort((a, b) => answer.has(a) - answer.has(b) || last.y(last.values[b]) - last.y(last.values[a]));
  for (const index of indexes) {
    const good = 1 - (last.y(last.values[index]) - top) / (height - top - bottom), best = answer.has(index);
    const at = axes.filter((axis) => axis.values[index] !== null).map((axis) => `${axis.x.toFixed(1)},${axis.y(axis.values[index]).toFixed(1)}`);
    const line = make("polyline", { points: at.join(" "), fill: "none", stroke: colour(best ? "line" : "point"), "stroke-width": best ? 2.4 : 1, opacity: best ? 1 : (0.06 + 0.5 * good ** 3).toFixed(3) });
    line.append(make("title", {}, `trial ${run.number[index]}: ${run.labels.map((label, o) => `${label} = ${write(run.rewards[o][index])}`).join(", ")}`));
    svg.append(line);
  }
  const room = Math.min(13, Math.floor((width - 2 * side) / (axes.length - 1) / 7.7)), cut = (text) => (text.length > room ? `${text.slice(0, room - 1)}…` : text);
  axes.forEach((axis) => {
    svg.append(make("line", { x1: axis.x, x2: axis.x, y1: top, y2: height - bottom, stroke: colour("muted") }));
    svg.append(make("text", { x: axis.x, y: 12, "text-anchor": "middle", "font-weight": 600, fill: colour("ink") }, cut(axis.name)));
    svg.lastChild.append(make("title", {}, axis.name));
    const marks = axis.names ? axis.names.slice(0, 24).map((name, at) => [name, at]) : [[write(Number(axis.scale.high.toPrecision(4))), axis.scale.high], [write(Number(axis.scale.low.toPrecision(4))), axis.scale.low]];
    for (const [name, value] of marks) {
      const y = axis.y(value), end = !axis.names && (y <= top + 1 ? -6 : 14);
      svg.append(make("text", axis.names ? { x: axis.x + 5, y: y + 4, stroke: colour("paper"), "stroke-width": 3, "paint-order": "stroke" } : { x: axis.x, y: y + end, "text-anchor": "middle" }, axis.names ? cut(String(name)) : name));
    }
  });
  plot.replaceChildren(svg);
}

// Every trial as a row: fifty at a time, sorted by the column that was clicked.
function trialTable(holder) {
  const { names, columns } = runs[Number(holder.dataset.run)].table, run = runs[Number(holder.dataset.run)];
  const order = columns[0].map((_, index) => index), table = element("table"), head = element("tr"), body = element("tbody"), more = element("button");
  let shown = 0, sorted = 0, falling = false;
  table.className = "wide";
  const add = () => {
    for (const index of order.slice(shown, shown + 50)) {
      const row = element("tr");
      columns.forEach((column, place) => {
        const cell = element("td", write(column[index]));
        cell.className = typeof column[index] === "number" ? "number" : names[place] === "reason" ? "words" : "mono";
        row.append(cell);
      });
      if (columns[1][index] !== "ok") row.className = "fixed";
      body.append(row);
    }
    shown = Math.min(order.length, shown + 50);
    more.textContent = `Show more (${write(order.length - shown)} left)`;
    more.hidden = shown >= order.length;
  };
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a) < String(b) ? -1 : String(a) > String(b) ? 1 : 0);
  const sort = (place) => {
    const objective = run.labels.indexOf(names[place]);
    falling = place === sorted ? !falling : objective >= 0 && !lower(run, objective);
    sorted = place;
    const column = columns[place];
    // Empty cells come last, whatever the direction.
    order.sort((a, b) => (column[a] === null) - (column[b] === null) || (falling ? -1 : 1) * compare(column[a], column[b]) || a - b);
    [...head.children].forEach((cell, at) => { cell.setAttribute("aria-sort", at === place ? (falling ? "descending" : "ascending") : "none"); });
    body.replaceChildren();
    shown = 0;
    add();
  };
  names.forEach((name, place) => {
    const cell = element("th"), button = element("button", name);
    cell.scope = "col";
    button.type = more.type = "button";
    button.addEventListener("click", () => sort(place));
    cell.append(button);
    head.append(cell);
  });
  more.addEventListener("click", add);
  const thead = element("thead");
  thead.append(head);
  table.append(thead, body);
  holder.append(table, more);
  add();
}
document.querySelectorAll(".trials-table").forEach(trialTable);

const figures = [...document.querySelectorAll("figure[data-chart]")];
const drawn = new Map();
function draw(figure) {
  const plot = figure.querySelector(".plot");
  if (figure.dataset.chart === "parallel") {
    if (!drawn.has(figure)) {
      let width = plot.clientWidth;
      new ResizeObserver(() => {
        if (plot.clientWidth === width) return;
        width = plot.clientWidth;
        draw(figure);
      }).observe(plot);
      drawn.set(figure, null);
    }
    parallel(runs[Number(figure.dataset.run)], figure);
    return;
  }
  let chart = drawn.get(figure);
  if (!chart) {
    chart = echarts.init(plot, null, { renderer: "svg" });
    drawn.set(figure, chart);
    let width = plot.clientWidth;
    new ResizeObserver(() => {
      if (plot.clientWidth === width) return;
      width = plot.clientWidth;
      chart.resize();
      draw(figure);
    }).observe(plot);
  }
  chart.setOption(charts[figure.dataset.chart](runs[Number(figure.dataset.run)], figure), true);
}

// One chart at a time, so that the page can be read while the later ones are still being drawn.
function drawAll(queue) {
  if (queue.length) {
    draw(queue[0]);
    root.dataset.rendered = String(drawn.size);
    setTimeout(drawAll, 0, queue.slice(1));
  }
}
const redraw = () => figures.forEach(draw);
root.dataset.rendered = "0";
root.dataset.charts = String(figures.length);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
matchMedia("print").addEventListener("change", redraw);
drawAll(figures);
