"use strict";
// Draws figures with plotly.js in the colours of their page, in reports as on the what-if page.
function painter(narrowLook) {
  const narrow = window.matchMedia(narrowLook);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const touch = window.matchMedia("(pointer: coarse)");

  // "@blue/20" in the data is the theme's blue at 20 % opacity
  function colour(name) {
    const [key, opacity] = name.slice(1).split("/");
    const hex = getComputedStyle(document.documentElement).getPropertyValue("--" + key).trim();
    if (!opacity) return hex;
    const part = (at) => parseInt(hex.slice(at, at + 2), 16);
    return `rgba(${part(1)},${part(3)},${part(5)},${opacity / 100})`;
  }
  function painted(value) {
    if (typeof value === "string") return /^@[a-z]+(\/\d+)?$/.test(value) ? colour(value) : value;
    if (Array.isArray(value)) return typeof value[0] === "number" ? value : value.map(painted);
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, painted(inner)]));
    }
    return value;
  }
  function axis(given) {
    const { title, ...own } = given;
    const base = {
      gridcolor: "@grid", linecolor: "@rule", zeroline: false, ticks: "outside", tickcolor: "@rule", ticklen: 4,
      automargin: true, fixedrange: touch.matches, exponentformat: "none", separatethousands: true,
    };
    return Object.assign(base, title ? { title: { text: title, standoff: 8, font: { size: 13 } } } : {}, own);
  }
  function layout(figure) {
    const given = figure.layout;
    const size = narrow.matches ? 12 : 13;
    const axes = Object.keys(given).filter((key) => /^[xy]axis/.test(key));
    return painted(Object.assign({}, given, Object.fromEntries(axes.map((key) => [key, axis(given[key])])), {
      font: { family: "system-ui, -apple-system, 'Segoe UI', Roboto, Arial, sans-serif", size, color: "@text" },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: narrow.matches ? 44 : 60, r: narrow.matches ? 8 : 14, t: 8, b: 46 },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size } },
      hoverlabel: { bgcolor: "@panel", bordercolor: "@rule", font: { color: "@text" } },
      dragmode: touch.matches ? false : "zoom", autosize: true, separators: ".,",
    }));
  }

  return {
    draw: (place, figure) => Plotly.react(place, painted(figure.data), layout(figure), {
      responsive: true, displaylogo: false, displayModeBar: false,
    }),
    // what is drawn has to be drawn anew when the page looks otherwise
    onNewLook(redraw) {
      dark.addEventListener("change", redraw);
      narrow.addEventListener("change", redraw);
    },
  };
}
