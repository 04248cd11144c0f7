"use strict";
(() => {
  const began = performance.now();
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const ROW = 22, NAMES = 168, EDGE = 14, PHASE = { queue: 2, prefill: 3, decode: 4 };
  const all = data.requests, first = 0;
  const last = all.reduce((most, r) => Math.max(most, r.e), 1);
  const state = { from: first, to: last, rows: [], chosen: null, statuses: new Set(data.statuses.keys()), hover: null };
  const numbers = new Intl.NumberFormat("en");

  // ---- words

  function span(us) {
    if (us < 1000) return `${Math.round(us)} µs`;
    if (us < 1e6) return `${(us / 1e3).toFixed(us < 1e4 ? 2 : 1)} ms`;
    if (us < 6e7) return `${(us / 1e6).toFixed(us < 1e7 ? 3 : 2)} s`;
    return `${Math.floor(us / 6e7)} min ${((us % 6e7) / 1e6).toFixed(0)} s`;
  }
  /** A point on the axis: no more digits than it needs. */
  function point(us) {
    if (us >= 6e7 || us === 0) return us ? span(us) : "0";
    const [unit, name] = us < 1000 ? [1, "µs"] : us < 1e6 ? [1e3, "ms"] : [1e6, "s"];
    return `${Number((us / unit).toPrecision(8))} ${name}`;
  }
  const nameOf = (r) => r.c || r.id;
  const endOf = (r) => r.slug || data.statuses[r.st].replace("_", " ");
  function make(tag, text, attributes = {}) {
    const element = document.createElement(tag);
    if (text !== undefined && text !== null) element.textContent = text;
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("--")) element.style.setProperty(name, value);
      else element.setAttribute(name, value);
    }
    return element;
  }
  function quantile(sorted, share) {
    return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
  }
  function phaseTime(r, phase) {
    return r.seg.reduce((sum, s) => sum + (s[0] === phase ? s[2] - s[1] : 0), 0);
  }

  // ---- choosing

  for (const r of all) {
    r.text = [r.id, r.c, r.m, r.slug, data.statuses[r.st], r.asked && r.asked.tenant, r.asked && r.asked.kind]
      .filter(Boolean).join("\n").toLowerCase();
  }
  const orders = {
    arrival: (a, b) => a.b - b.b,
    duration: (a, b) => b.e - b.b - (a.e - a.b),
    first: (a, b) => (b.ft || 0) - (a.ft || 0),
    queue: (a, b) => phaseTime(b, PHASE.queue) - phaseTime(a, PHASE.queue),
    tokens: (a, b) => b.out - a.out,
  };

  function choose() {
    const started = performance.now();
    const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const slug = $("slug").value;
    state.rows = all.filter((r) => state.statuses.has(r.st) && (!slug || r.slug === slug) &&
      words.every((word) => r.text.includes(word)));
    state.rows.sort(orders[$("order").value]);
    $("spacer").style.height = `${Math.max(0, state.rows.length * ROW - $("scroll").clientHeight)}px`;
    $("empty").hidden = state.rows.length > 0;
    if (state.chosen && !state.rows.includes(state.chosen)) show(null);
    figures();
    state.depth = depth(state.rows);
    draw();
    document.documentElement.dataset.filterMs = (performance.now() - started).toFixed(1);
    document.documentElement.dataset.shown = state.rows.length;
  }

  function figures() {
    const rows = state.rows;
    const total = rows.map((r) => r.e - r.b).sort((a, b) => a - b);
    const token = rows.filter((r) => r.ft !== undefined).map((r) => r.ft).sort((a, b) => a - b);
    const pair = (sorted) => sorted.length ? `${span(quantile(sorted, 0.5))} · ${span(quantile(sorted, 0.99))}` : "–";
    const shown = rows.length === all.length ? numbers.format(all.length)
      : `${numbers.format(rows.length)} of ${numbers.format(all.length)}`;
    const list = [
      ["requests", shown],
      ["span", span(last)],
      ["output tokens", numbers.format(rows.reduce((sum, r) => sum + r.out, 0))],
      ["first token, p50 · p99", pair(token)],
      ["whole request, p50 · p99", pair(total)],
    ];
    $("figures").replaceChildren(...list.map(([label, value]) => {
      const box = make("div");
      box.append(make("dt", label), make("dd", value));
      return box;
    }));
  }

  function depth(rows) {
    const changes = [];
    for (const r of rows) {
      if (r.adm !== undefined) changes.push([r.b + r.adm, 1, 0], [r.sch === undefined ? r.e : r.b + r.sch, -1, 0]);
      if (r.sch !== undefined) changes.push([r.b + r.sch, 0, 1], [r.e, 0, -1]);
    }
    changes.sort((a, b) => a[0] - b[0]);
    let waiting = 0, running = 0, most = 1;
    const points = [];
    for (const [at, moreWaiting, moreRunning] of changes) {
      waiting += moreWaiting; running += moreRunning;
      most = Math.max(most, waiting + running);
      if (points.length && points[points.length - 1][0] === at) points.pop();
      points.push([at, waiting, running]);
    }
    return { points, most };
  }

  // ---- drawing

  let colors = {};
  function readColors() {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(name).trim();
    colors = {
      phases: data.phases.map((_, i) => read(`--p${i}`)), statuses: data.statuses.map((_, i) => read(`--s${i}`)),
      text: read("--text"), soft: read("--soft"), line: read("--line"), grid: read("--grid"), panel: read("--panel"),
      chosen: read("--chosen"), hover: read("--hover"), accent: read("--accent"),
    };
  }
  const FONT = '12px system-ui, -apple-system, "Segoe UI", "Liberation Sans", "DejaVu Sans", sans-serif';
  function surface(canvas, height) {
    const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.height = `${height}px`;
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = FONT;
    pen.textBaseline = "middle";
    return [pen, width];
  }
  let queued = false;
  function draw() {
    if (queued) return;
    queued = true;
    requestAnimationFrame(() => { queued = false; drawDepth(); drawAxis(); drawRows(); });
  }
  function plotWidth() {
    return Math.max(50, $("rows").clientWidth - NAMES - EDGE);
  }
  const xOf = (us) => NAMES + (us - state.from) / (state.to - state.from) * plotWidth();
  const usOf = (x) => state.from + (x - NAMES) / plotWidth() * (state.to - state.from);

  function steps(width) {
    const raw = (state.to - state.from) / Math.max(2, width / 110);
    const base = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((m) => m * base).find((s) => s >= raw);
    const found = [];
    for (let at = Math.ceil(state.from / step) * step; at <= state.to; at += step) found.push(at);
    return found;
  }
  function drawAxis() {
    const [pen] = surface($("axis"), 24);
    pen.fillStyle = colors.soft;
    pen.fillText("request", 12, 12);
    pen.textAlign = "center";
    for (const at of steps(plotWidth())) pen.fillText(point(at), Math.max(NAMES + 12, xOf(at)), 12);
    pen.textAlign = "left";
  }

  function drawDepth() {
    const height = 96, top = 12, floor = height - 8;
    const [pen, width] = surface($("depth"), height);
    const { points, most } = state.depth;
    const plot = Math.max(50, width - NAMES - EDGE);
    const x = (us) => NAMES + us / last * plot, y = (count) => floor - count / most * (floor - top);
    pen.strokeStyle = colors.grid;
    pen.beginPath();
    for (const part of [0, 0.5, 1]) { pen.moveTo(NAMES, y(most * part)); pen.lineTo(NAMES + plot, y(most * part)); }
    pen.stroke();
    // One column for each pixel holds the largest value that falls into it: a short burst is seen too.
    const columns = Math.ceil(plot);
    const areas = [[2, colors.phases[PHASE.decode], (p) => p[2]], [1, colors.phases[PHASE.queue], (p) => p[1] + p[2]]];
    for (const [, color, value] of areas.reverse()) {
      const highest = new Float64Array(columns);
      let level = 0, column = 0;
      for (const point of points) {
        const at = Math.min(columns - 1, Math.floor(point[0] / last * columns));
        while (column < at) { highest[column] = Math.max(highest[column], level); column += 1; }
        highest[at] = Math.max(highest[at], level, value(point));
        level = value(point);
      }
      pen.fillStyle = color;
      for (let i = 0; i < columns; i += 1) {
        if (highest[i]) pen.fillRect(NAMES + i, y(highest[i]), 1, floor - y(highest[i]));
      }
    }
    for (const [text, phase, line] of [["waiting", PHASE.queue, 24], ["running", PHASE.decode, 42]]) {
      pen.fillStyle = colors.phases[phase];
      pen.fillRect(12, line - 5, 10, 10);
      pen.fillStyle = colors.soft;
      pen.fillText(text, 28, line + 0.5);
    }
    pen.textAlign = "right";
    pen.fillText(String(most), NAMES - 6, top + 1);
    pen.fillText("0", NAMES - 6, floor);
    pen.textAlign = "left";
    if (state.from > first || state.to < last) {
      pen.fillStyle = colors.panel;
      pen.globalAlpha = 0.72;
      pen.fillRect(NAMES, 0, x(state.from) - NAMES, height);
      pen.fillRect(x(state.to), 0, NAMES + plot - x(state.to), height);
      pen.globalAlpha = 1;
      pen.strokeStyle = colors.accent;
      const left = Math.round(x(state.from)) + 0.5;
      pen.strokeRect(left, 1.5, Math.max(2, Math.round(x(state.to) - x(state.from))), height - 3);
    }
  }

  function drawRows() {
    const scroll = $("scroll"), height = scroll.clientHeight;
    const [pen, width] = surface($("rows"), height);
    const top = scroll.scrollTop, from = Math.floor(top / ROW), right = NAMES + plotWidth();
    pen.strokeStyle = colors.grid;
    pen.beginPath();
    for (const at of steps(plotWidth())) {
      const x = Math.round(xOf(at)) + 0.5;
      if (x >= NAMES) { pen.moveTo(x, 0); pen.lineTo(x, height); }
    }
    pen.stroke();
    for (let i = from; i < state.rows.length && i * ROW - top < height; i += 1) {
      const r = state.rows[i], y = i * ROW - top;
      if (r === state.chosen || r === state.hover) {
        pen.fillStyle = r === state.chosen ? colors.chosen : colors.hover;
        pen.fillRect(0, y, width, ROW);
      }
      pen.fillStyle = colors.statuses[r.st];
      pen.beginPath();
      pen.arc(15, y + ROW / 2, 4, 0, 7);
      pen.fill();
      pen.fillStyle = colors.text;
      pen.fillText(clipped(pen, nameOf(r), NAMES - 38), 26, y + ROW / 2 + 0.5);
      pen.save();
      pen.beginPath();
      pen.rect(NAMES, y, right - NAMES + EDGE, ROW);
      pen.clip();
      drawBar(pen, r, y);
      pen.restore();
    }
  }
  function clipped(pen, text, width) {
    let shown = text.length > 60 ? text.slice(0, 60) : text;
    if (pen.measureText(shown).width <= width && shown === text) return shown;
    while (shown && pen.measureText(`${shown}…`).width > width) shown = shown.slice(0, -1);
    return `${shown}…`;
  }
  function drawBar(pen, r, y) {
    const begin = xOf(r.b), end = xOf(r.e);
    if (end < NAMES || begin > NAMES + plotWidth() + EDGE) return;
    for (const [phase, from, to] of r.seg) {
      const left = xOf(r.b + from), wide = xOf(r.b + to) - left;
      pen.fillStyle = colors.phases[phase];
      pen.fillRect(left, y + 5, Math.max(wide, 0.6), ROW - 10);
    }
    const scale = plotWidth() / (state.to - state.from);
    if (r.tok && (r.e - r.b) * scale > 60) {
      pen.fillStyle = colors.panel;
      pen.globalAlpha = 0.55;
      let drawn = -9;
      for (const [at] of r.tok) {
        const x = xOf(r.b + at);
        if (x - drawn >= 3) { pen.fillRect(x, y + 7, 1, ROW - 14); drawn = x; }
      }
      pen.globalAlpha = 1;
    }
    for (const [at] of r.re || []) {
      pen.fillStyle = colors.statuses[1];
      pen.fillRect(xOf(r.b + at) - 1, y + 2, 2, ROW - 4);
    }
    const due = dueOf(r);
    if (due !== null && (r === state.chosen || r === state.hover)) {
      pen.strokeStyle = colors.statuses[3];
      pen.setLineDash([3, 2]);
      pen.beginPath();
      for (const at of r.dl ? sampled(r.dl.map((d) => d[1])) : [due]) {
        const x = Math.round(xOf(r.b + at)) + 0.5;
        pen.moveTo(x, y + 1); pen.lineTo(x, y + ROW - 1);
      }
      pen.stroke();
      pen.setLineDash([]);
    }
    if (r.st !== 0) {
      pen.fillStyle = colors.statuses[r.st];
      pen.fillRect(end, y + 3, 3, ROW - 6);
      if (end + 8 < NAMES + plotWidth() - 40) pen.fillText(endOf(r), end + 8, y + ROW / 2 + 0.5);
    }
  }
  function sampled(list, most = 200) {
    const step = Math.ceil(list.length / most);
    return list.filter((_, i) => i % step === 0 || i === list.length - 1);
  }
  function dueOf(r) {
    if (r.dl) return r.dl[r.dl.length - 1][1];
    const limits = Object.values(r.lim || {});
    return limits.length ? Math.min(...limits) * 1e6 : null;
  }

  // ---- details

  function show(r) {
    state.chosen = r;
    $("details").hidden = !r;
    if (r) {
      $("name").textContent = nameOf(r);
      $("body").replaceChildren(...details(r));
      $("live").textContent = `${nameOf(r)}: ${endOf(r)}, ${span(r.e - r.b)}, ${r.out} tokens`;
      drawTokens(r);
    }
    draw();
  }
  function details(r) {
    const found = [];
    const end = make("div", undefined, { class: "end", "--c": `var(--s${r.st})` });
    end.append(make("i"), make("span", data.statuses[r.st].replace("_", " ") + (r.slug ? ` · ${r.slug}` : "")));
    found.push(end);
    if (r.msg) found.push(make("p", r.msg, { class: "message" }));
    if (r.cut) found.push(make("p", "The beginning of this request is not in the recording.", { class: "message" }));
    const total = Math.max(1, r.e - r.b);
    const shares = table(null, [
      ...r.seg.map(([phase, from, to]) => {
        const label = make("span");
        label.append(make("i", undefined, { "--c": `var(--p${phase})` }), data.phases[phase]);
        const share = make("span", undefined, { class: "share", "--c": `var(--p${phase})` });
        share.style.width = `${((to - from) / total * 100).toFixed(1)}%`;
        share.style.marginLeft = `${(from / total * 100).toFixed(1)}%`;
        return [label, share, span(to - from)];
      }),
      ["in all", "", span(r.e - r.b)],
    ]);
    shares.className = "shares";
    found.push(make("h3", "Where the time went"), shares);
    const facts = [
      ["id", r.id], ["caller's id", r.c], ["model", r.m], ["arrived", `${span(r.b)} after the first`],
      ["wall clock", data.wall ? new Date(data.wall * 1e3 + r.b / 1e3).toISOString().replace("T", " ") : ""],
      ["first token", r.ft === undefined ? "" : span(r.ft)],
      ["prompt tokens", r.pt === undefined ? "" : numbers.format(r.pt) + (r.ct ? ` (${r.ct} from the cache)` : "")],
      ["output tokens", numbers.format(r.out)], ["finish reason", r.fin],
      ...Object.entries(r.asked || {}).map(([name, value]) => [name.replace("_", " "), value === null ? "–" : String(value)]),
      ...Object.entries(r.lim || {}).map(([name, value]) => [`limit: ${name.replace("_", " ")}`, `${value} s`]),
    ].filter(([, value]) => value !== undefined && value !== "" && value !== null);
    found.push(make("h3", "Request"), table(null, facts));
    if (r.tok) found.push(make("h3", "Tokens over time"), make("canvas", undefined, { class: "spark", id: "spark" }));
    if (r.re) found.push(make("h3", "Retries"), table(["at", "attempt", "because of"], r.re.map(([at, n, why]) => [span(at), n, why])));
    if (r.dl) {
      const shown = r.dl.slice(0, 60).map(([at, due, limit]) => [span(at), span(due), limit.replace("_", " ")]);
      found.push(make("h3", `Deadline moves (${r.dl.length})`), table(["at", "now due at", "limit"], shown));
      if (r.dl.length > 60) found.push(make("p", `… and ${r.dl.length - 60} more`, { class: "message" }));
    }
    return found;
  }
  function table(head, rows) {
    const found = make("table");
    if (head) {
      const line = make("tr");
      line.append(...head.map((text) => make("th", text, { scope: "col" })));
      found.append(line);
    }
    for (const cells of rows) {
      const line = make("tr");
      for (const cell of cells) {
        const box = make("td", undefined, /^[0-9a-f]{32}$/.test(cell) ? { class: "mono" } : {});
        box.append(cell instanceof Node ? cell : String(cell));
        line.append(box);
      }
      found.append(line);
    }
    return found;
  }
  function drawTokens(r) {
    const canvas = $("spark");
    if (!canvas || !r.tok) return;
    const [pen, width] = surface(canvas, 72);
    const span_ = Math.max(1, r.e - r.b), total = r.tok.reduce((sum, t) => sum + t[1], 0);
    let made = 0;
    pen.strokeStyle = colors.phases[PHASE.decode];
    pen.lineWidth = 1.5;
    pen.beginPath();
    pen.moveTo(0, 68);
    for (const [at, count] of r.tok) {
      const x = at / span_ * (width - 4);
      pen.lineTo(x, 68 - made / total * 60);
      made += count;
      pen.lineTo(x, 68 - made / total * 60);
    }
    pen.lineTo(width - 4, 8);
    pen.stroke();
    pen.fillStyle = colors.soft;
    pen.fillText(`${total} tokens`, 4, 12);
    pen.textAlign = "right";
    pen.fillText(span(r.e - r.b), width - 4, 60);
    pen.textAlign = "left";
  }

  // ---- moving

  function view(from, to) {
    const least = 20, wide = Math.min(Math.max(to - from, least), last - first);
    const centre = (from + to) / 2;
    state.from = Math.max(first, Math.min(centre - wide / 2, last - wide));
    state.to = state.from + wide;
    draw();
  }
  function zoom(factor, at = (state.from + state.to) / 2) {
    const left = (at - state.from) * factor, right = (state.to - at) * factor;
    view(at - left, at + right);
  }
  function pan(share) {
    const by = Math.max(first - state.from, Math.min(last - state.to, (state.to - state.from) * share));
    view(state.from + by, state.to + by);
  }
  function rowAt(event) {
    const box = $("scroll").getBoundingClientRect();
    return state.rows[Math.floor((event.clientY - box.top + $("scroll").scrollTop) / ROW)] || null;
  }
  function step(by) {
    if (!state.rows.length) return;
    const at = state.rows.indexOf(state.chosen);
    const next = at < 0 ? (by > 0 ? 0 : state.rows.length - 1) : Math.max(0, Math.min(state.rows.length - 1, at + by));
    const scroll = $("scroll"), y = next * ROW;
    if (y < scroll.scrollTop) scroll.scrollTop = y;
    else if (y + ROW > scroll.scrollTop + scroll.clientHeight) scroll.scrollTop = y + ROW - scroll.clientHeight;
    show(state.rows[next]);
  }

  const rows = $("rows");
  let drag = null;
  rows.addEventListener("pointerdown", (event) => {
    drag = { x: event.clientX, y: event.clientY, from: state.from, to: state.to, top: $("scroll").scrollTop, moved: false };
    rows.setPointerCapture(event.pointerId);
  });
  rows.addEventListener("pointermove", (event) => {
    if (drag) {
      const dx = event.clientX - drag.x, dy = event.clientY - drag.y;
      drag.moved = drag.moved || Math.abs(dx) + Math.abs(dy) > 4;
      if (drag.moved) {
        rows.classList.add("moving");
        const by = -dx / plotWidth() * (drag.to - drag.from);
        const kept = Math.max(first - drag.from, Math.min(last - drag.to, by));
        $("scroll").scrollTop = drag.top - dy;
        view(drag.from + kept, drag.to + kept);
        tip(null);
      }
      return;
    }
    const r = rowAt(event);
    if (r !== state.hover) { state.hover = r; draw(); }
    tip(r, event);
  });
  rows.addEventListener("pointerup", (event) => {
    rows.classList.remove("moving");
    if (drag && !drag.moved) show(rowAt(event));
    drag = null;
  });
  rows.addEventListener("pointercancel", () => { rows.classList.remove("moving"); drag = null; });
  rows.addEventListener("pointerleave", () => { state.hover = null; tip(null); draw(); });
  rows.addEventListener("dblclick", (event) => zoom(0.4, usOf(event.offsetX)));
  $("scroll").addEventListener("wheel", (event) => {
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      const box = rows.getBoundingClientRect();
      zoom(Math.exp(event.deltaY * 0.0022), usOf(Math.max(NAMES, event.clientX - box.left)));
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      pan((event.deltaX || event.deltaY) / plotWidth());
    }
  }, { passive: false });
  $("scroll").addEventListener("scroll", draw);
  function tip(r, event) {
    $("tip").hidden = !r;
    if (!r) return;
    const at = usOf(event.clientX - rows.getBoundingClientRect().left) - r.b;
    const part = r.seg.find(([, from, to]) => at >= from && at < to);
    $("tip").textContent = `${nameOf(r)}\n${endOf(r)} · ${span(r.e - r.b)} · ${r.out} tokens` +
      (part ? `\n${data.phases[part[0]]}: ${span(part[2] - part[1])}` : "");
    const box = $("tip").getBoundingClientRect();
    $("tip").style.left = `${Math.min(event.clientX + 14, innerWidth - box.width - 8)}px`;
    $("tip").style.top = `${Math.min(event.clientY + 16, innerHeight - box.height - 8)}px`;
  }

  const over = $("depth");
  let brush = null;
  const overAt = (event) => {
    const box = over.getBoundingClientRect();
    return Math.max(0, Math.min(1, (event.clientX - box.left - NAMES) / (box.width - NAMES - EDGE))) * last;
  };
  over.addEventListener("pointerdown", (event) => { brush = overAt(event); over.setPointerCapture(event.pointerId); });
  over.addEventListener("pointermove", (event) => {
    if (brush === null) return;
    const at = overAt(event);
    if (Math.abs(at - brush) > last / 400) { view(Math.min(at, brush), Math.max(at, brush)); follow(); }
  });
  /** In the order of arrival, keep what the chosen span shows in sight. */
  function follow() {
    if ($("order").value !== "arrival") return;
    const at = state.rows.findIndex((r) => r.e >= state.from);
    if (at >= 0) $("scroll").scrollTop = at * ROW;
  }
  over.addEventListener("pointerup", (event) => {
    const at = overAt(event);
    if (brush !== null && Math.abs(at - brush) <= last / 400) {
      const half = (state.to - state.from) / 2;
      view(at - half, at + half);
      follow();
    }
    brush = null;
  });

  // ---- controls

  document.addEventListener("keydown", (event) => {
    const typing = event.target.matches("input, select");
    if (event.key === "Escape") {
      if (typing) event.target.blur();
      show(null);
      $("scroll").focus();
      return;
    }
    if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
    const onButton = event.target.matches("button") && (event.key === "Enter" || event.key === " ");
    const keys = {
      "/": () => $("search").focus(), ArrowDown: () => step(1), ArrowUp: () => step(-1), PageDown: () => step(20),
      PageUp: () => step(-20), Home: () => step(-state.rows.length), End: () => step(state.rows.length),
      ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15), "+": () => zoom(0.6), "=": () => zoom(0.6),
      "-": () => zoom(1 / 0.6), 0: () => view(first, last), Enter: () => step(0), t: turn,
      z: () => state.chosen && view(state.chosen.b - (state.chosen.e - state.chosen.b) * 0.05,
        state.chosen.e + (state.chosen.e - state.chosen.b) * 0.05),
    };
    if (!onButton && keys[event.key]) { event.preventDefault(); keys[event.key](); }
  });
  function turn() {
    theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  }
  function theme(name) {
    document.documentElement.dataset.theme = name;
    document.documentElement.style.colorScheme = name;
    readColors();
    if (state.chosen) drawTokens(state.chosen);
    draw();
  }
  $("theme").addEventListener("click", turn);
  $("in").addEventListener("click", () => zoom(0.6));
  $("out").addEventListener("click", () => zoom(1 / 0.6));
  $("fit").addEventListener("click", () => view(first, last));
  $("close").addEventListener("click", () => { show(null); $("scroll").focus(); });
  for (const id of ["slug", "order"]) $(id).addEventListener("change", () => { $("scroll").scrollTop = 0; choose(); });
  let later = 0;
  $("search").addEventListener("input", () => {
    clearTimeout(later);
    later = setTimeout(() => { $("scroll").scrollTop = 0; choose(); }, 60);
  });
  $("clear").addEventListener("click", () => {
    $("search").value = "";
    $("slug").value = "";
    state.statuses = new Set(data.statuses.keys());
    chips();
    choose();
  });
  new ResizeObserver(() => {
    $("spacer").style.height = `${Math.max(0, state.rows.length * ROW - $("scroll").clientHeight)}px`;
    draw();
  }).observe($("scroll"));

  function chips() {
    const counts = data.statuses.map((_, i) => all.filter((r) => r.st === i).length);
    $("statuses").replaceChildren(...data.statuses.flatMap((status, i) => {
      if (!counts[i]) return [];
      const chip = make("button", undefined, {
        class: "chip", type: "button", "aria-pressed": String(state.statuses.has(i)), "--c": `var(--s${i})`,
        "data-status": status,
      });
      chip.append(make("i"), make("span", status.replace("_", " ")), make("b", numbers.format(counts[i])));
      chip.addEventListener("click", () => {
        if (!state.statuses.delete(i)) state.statuses.add(i);
        chip.setAttribute("aria-pressed", String(state.statuses.has(i)));
        choose();
      });
      return [chip];
    }));
  }
  const reasons = [...new Set(all.map((r) => r.slug).filter(Boolean))].sort();
  $("slug").append(make("option", "any", { value: "" }), ...reasons.map((slug) => make("option", slug, { value: slug })));
  $("source").textContent = `${data.source} · ${numbers.format(data.events)} events` +
    (data.wall ? ` · from ${new Date(data.wall * 1e3).toLocaleString()}` : "");
  if (data.notes.length) {
    $("notes").textContent = data.notes.join(" · ");
    $("notes").hidden = false;
  }
  $("legend").append(
    ...data.phases.map((phase, i) => legend(phase, `var(--p${i})`, "")),
    legend("retry", "var(--s1)", "mark"), legend("deadline of the chosen one", "var(--s3)", "mark dash"),
  );
  function legend(name, color, kind) {
    const found = make("span");
    found.append(make("i", undefined, { "--c": color, class: kind }), name);
    return found;
  }
  theme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  chips();
  choose();
  requestAnimationFrame(() => requestAnimationFrame(() => {
    document.documentElement.dataset.readyMs = (performance.now() - began).toFixed(1);
  }));
})();
