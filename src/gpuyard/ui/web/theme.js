/* Light or dark as it was chosen, before anything is painted: a classic script, as modules come after that. */
"use strict";
try {
  const chosen = window.localStorage.getItem("gpuyard-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch (error) {
  console.info("gpuyard: this browser stores no settings", error);
}
