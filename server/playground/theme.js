// Light, dark, or the system's theme. A classic script in the head, so that the page never flashes in the wrong colours.
(() => {
  const KEY = "logitship.theme";
  const ORDER = ["auto", "light", "dark"];

  function stored() {
    try {
      const theme = localStorage.getItem(KEY);
      return ORDER.includes(theme) ? theme : "auto";
    } catch {
      return "auto"; // storage may be forbidden
    }
  }

  function apply(theme) {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
  }

  let theme = stored();
  apply(theme);

  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const label = button.querySelector("[data-label]");
    const show = () => {
      label.textContent = theme[0].toUpperCase() + theme.slice(1);
    };
    show();
    button.addEventListener("click", () => {
      theme = ORDER[(ORDER.indexOf(theme) + 1) % ORDER.length];
      apply(theme);
      show();
      try {
        localStorage.setItem(KEY, theme);
      } catch {
        // Storage is forbidden: the choice lasts until the page is closed.
      }
    });
  });
})();
