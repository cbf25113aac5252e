// The browser of samples: search, previous and next. Without scripts every sample is shown.
for (const browser of document.querySelectorAll("[data-browser]")) {
  const samples = [...browser.querySelectorAll(".sample")];
  const tools = browser.querySelector(".tools");
  const [search, said] = [tools.querySelector("input"), tools.querySelector("output")];
  const texts = samples.map((sample) => sample.textContent.toLowerCase());
  let shown = samples, at = 0;
  const show = () => {
    for (const sample of samples) sample.hidden = sample !== shown[at];
    said.textContent = shown.length ? `${at + 1} of ${shown.length}` : "no sample has that text";
  };
  const go = (step) => { if (shown.length) at = (at + step + shown.length) % shown.length; show(); };
  search.addEventListener("input", () => {
    const words = search.value.toLowerCase();
    shown = samples.filter((_, number) => texts[number].includes(words));
    at = 0;
    show();
  });
  for (const button of tools.querySelectorAll("button")) button.addEventListener("click", () => go(Number(button.value)));
  browser.addEventListener("keydown", (event) => {
    if (event.target === search || event.altKey || event.ctrlKey || event.metaKey) return;
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step) { event.preventDefault(); go(step); }
  });
  tools.hidden = false;
  show();
}
