"use strict";
// A report's figures: each is drawn when it comes near the screen, all of them for printing.
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const paint = painter("(max-width: 700px)");
  const drawn = new Set();

  function draw(figure) {
    drawn.add(figure);
    paint.draw(document.getElementById("plot-" + figure.name), figure);
  }

  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      watcher.unobserve(entry.target);
      draw(figures.find((figure) => "plot-" + figure.name === entry.target.id));
    }
  }, { rootMargin: "600px" });
  figures.forEach((figure) => watcher.observe(document.getElementById("plot-" + figure.name)));
  paint.onNewLook(() => drawn.forEach(draw));
  window.addEventListener("beforeprint", () => figures.forEach(draw));
})();
