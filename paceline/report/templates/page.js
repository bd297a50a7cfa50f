(() => {
  // Marks carry the text of their tooltip as label, one value after each semicolon.
  const tooltip = document.getElementById("tooltip");
  addEventListener("pointermove", (event) => {
    const mark = event.target.closest(".role-mark > [aria-label]");
    tooltip.hidden = !mark;
    if (!mark) return;
    tooltip.textContent = mark.getAttribute("aria-label").replaceAll("; ", "\n");
    const { width, height } = tooltip.getBoundingClientRect();
    const left = Math.min(event.clientX + 12, document.documentElement.clientWidth - width - 8);
    const above = event.clientY + height + 20 > innerHeight;
    tooltip.style.left = `${Math.max(left, 8)}px`;
    tooltip.style.top = `${event.clientY + (above ? -height - 12 : 14)}px`;
  });

  // Print everything: open the folds before printing and close them afterwards.
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open])")];
    opened.forEach((fold) => (fold.open = true));
  });
  addEventListener("afterprint", () => opened.forEach((fold) => (fold.open = false)));
})();
