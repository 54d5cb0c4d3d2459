/** Dialogs that Back closes: an open dialog has an entry of its own in the browser's history. */

/** Show a dialog. Resolves to its return value when it is closed and its entry is gone; "" for Escape and Back. */
export function openModal(dialog) {
  document.body.append(dialog);
  history.pushState({isDialog: true}, "");
  dialog.showModal();
  return new Promise((resolve) => {
    let isEntryGone = false;
    const onBack = () => {
      isEntryGone = true;
      dialog.close("");
    };
    const onClose = async () => {
      window.removeEventListener("popstate", onBack);
      if (!isEntryGone) await goBack();
      dialog.remove();
      resolve(dialog.returnValue);
    };
    window.addEventListener("popstate", onBack);
    dialog.addEventListener("close", onClose, {once: true});
  });
}

/** Go back by one entry of this document; resolves when that is done, so that another page can be shown. */
function goBack() {
  return new Promise((resolve) => {
    window.addEventListener("popstate", resolve, {once: true});
    history.back();
  });
}
