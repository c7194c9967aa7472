"use strict";
// The server's figures: those on the screen are drawn at once, the others when they come into sight.
const figures = (() => {
  const paint = painter("(max-width: 900px)");
  const wanted = new Map(); // name → the figure that is to be seen there
  const inSight = new Set();
  const stale = new Set(); // names whose place shows an older figure

  function draw(name) {
    if (!window.Plotly || !inSight.has(name) || !stale.has(name)) return undefined;
    const figure = wanted.get(name);
    stale.delete(name);
    const data = figure.data.map((trace) => (/^highest/.test(trace.name || "") ? { ...trace, showlegend: false } : trace));
    return paint.draw(document.getElementById("plot-" + name), { ...figure, data });
  }

  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const name = entry.target.id.slice("plot-".length);
      if (entry.isIntersecting) inSight.add(name);
      else inSight.delete(name);
      draw(name);
    }
  }, { rootMargin: "200px" });
  for (const box of document.querySelectorAll("figure[id]")) {
    const place = document.createElement("div");
    place.className = "plot";
    place.id = box.id.replace("figure-", "plot-");
    place.tabIndex = 0;
    place.setAttribute("role", "img");
    const fold = document.createElement("details");
    const summary = document.createElement("summary");
    summary.textContent = "How to read it";
    fold.append(summary, document.createElement("figcaption"));
    box.append(document.createElement("h3"), place, fold);
    watcher.observe(place);
  }

  function redraw() {
    wanted.forEach((_, name) => stale.add(name));
    return Promise.all([...wanted.keys()].map(draw));
  }
  paint.onNewLook(redraw);
  document.querySelector("script[src*=plotly]").addEventListener("load", redraw);

  // the figure, and its words around it
  function show(figure) {
    const box = document.getElementById("figure-" + figure.name);
    box.querySelector("h3").textContent = figure.title;
    box.querySelector("figcaption").textContent = figure.caption;
    document.getElementById("plot-" + figure.name).setAttribute("aria-label", `${figure.title}. ${figure.caption}`);
    wanted.set(figure.name, figure);
    stale.add(figure.name);
    return draw(figure.name);
  }

  // --- the pinned state A as grey lines in the figures of B

  const OVERLAID = {
    kv: ["active"], queue: ["running", "waiting in the engine"],
    "cdf-ttft": ["TTFT"], "cdf-itl": ["ITL"], "cdf-e2el": ["E2EL"],
  };
  const short = (name) => name.replace(" in the engine", "");
  const UNIT_S = { "µs": 1e-6, ms: 1e-3, s: 1, min: 60, h: 3600 };
  function unitOf(figure) {
    const found = /\((µs|ms|s|min|h)\)$/.exec(figure.layout.xaxis.title || "");
    return found ? UNIT_S[found[1]] : 1;
  }
  function overlaid(figure, pinned) {
    const names = OVERLAID[figure.name];
    if (!pinned || !names) return figure;
    const scale = unitOf(pinned) / unitOf(figure);
    const lines = pinned.data.filter((trace) => names.includes(trace.name)).map((trace, k) => ({
      x: scale === 1 ? trace.x : trace.x.map((value) => value * scale), y: trace.y, type: "scatter", mode: "lines",
      name: "A: " + short(trace.name), showlegend: true,
      line: { color: "@text/70", width: 1.5, dash: k ? "dot" : "dash", shape: trace.line && trace.line.shape },
      hovertemplate: trace.hovertemplate,
    }));
    const own = lines.length
      ? figure.data.map((trace) => (names.includes(trace.name) ? { ...trace, showlegend: true, name: "B: " + short(trace.name) } : trace))
      : figure.data;
    return { ...figure, data: [...own, ...lines] };
  }

  return { show, overlaid };
})();
