(() => {
  const options = {
    renderer: "svg",
    actions: false,
    ast: true,
    defaultStyle: false,
    tooltip: { disableDefaultStyle: true },
  };

  async function draw(block) {
    const holder = document.getElementById(block.dataset.chart);
    try {
      await vegaEmbed(holder, JSON.parse(block.textContent), options);
    } catch (error) {
      holder.textContent = `This chart cannot be drawn: ${error.message}`;
      throw error;
    }
  }

  const blocks = [...document.querySelectorAll("script[data-chart]")];
  Promise.allSettled(blocks.map(draw)).then((outcomes) => {
    const failed = outcomes.find((outcome) => outcome.status === "rejected");
    document.documentElement.dataset.charts = failed ? "failed" : "ready";
    if (failed) throw failed.reason;
  });

  // Paper shows everything: folds open before printing and close again after it.
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open])")];
    opened.forEach((fold) => (fold.open = true));
  });
  addEventListener("afterprint", () => opened.forEach((fold) => (fold.open = false)));
})();
