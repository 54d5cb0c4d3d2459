/** Dialogs that Back closes: an open dialog has an entry of its own in the browser's history. */

let lastClosed = Promise.resolve("");

/** Go to another place of the page, once the entry of a dialog that was just closed is gone: going back would undo it. */
export async function goTo(hash) {
  await lastClosed;
  window.location.hash = hash;
}

/** Show a dialog. Resolves to its return value when it is closed and its entry is gone; "" for Escape and Back. */
export function openModal(dialog) {
  document.body.append(dialog);
  history.pushState({isDialog: true}, "");
  dialog.showModal();
  lastClosed = new Promise((resolve) => {
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
  return lastClosed;
}

/** Go back by one entry of this document; resolves when that is done, so that another page can be shown. */
function goBack() {
  return new Promise((resolve) => {
    window.addEventListener("popstate", resolve, {once: true});
    history.back();
  });
}
