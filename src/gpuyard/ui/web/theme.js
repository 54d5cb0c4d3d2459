/* Set the stored light or dark theme before the first paint. A classic script: modules run after the first paint. */
"use strict";
try {
  const chosen = window.localStorage.getItem("gpuyard-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch (error) {
  console.info("gpuyard: this browser stores no settings", error);
}
