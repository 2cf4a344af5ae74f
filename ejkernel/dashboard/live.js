"use strict";
(() => {
  // What is being tuned is asked for again and again; the tables only when they have changed.
  const part = (name, inside = document) => inside.getElementById(name);
  const parsed = (text) => new DOMParser().parseFromString(text, "text/html");
  let version = part("live").dataset.version;
  let shown = part("live").innerHTML;

  async function ask(path) {
    const answer = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(15000) });
    if (!answer.ok) throw new Error(`${answer.status}`);
    return parsed(await answer.text());
  }
  function replace(name, fresh) {
    part(name).replaceWith(document.adoptNode(part(name, fresh)));
  }
  async function look() {
    const fresh = await ask("/live");
    const { version: now } = part("live", fresh).dataset;
    if (part("live", fresh).innerHTML !== shown) {
      shown = part("live", fresh).innerHTML;
      replace("live", fresh);
    }
    if (now === version) return;
    const whole = await ask("/");
    for (const name of ["runs", "stored"]) replace(name, whole);
    version = now;
  }
  function lost() {
    const note = document.createElement("p");
    note.className = "lost";
    note.textContent = "The dashboard does not answer any more; this page shows its last state.";
    shown = null;
    part("live").replaceChildren(note);
  }
  async function forever() {
    let pause = document.hidden ? 3000 : 500;
    try {
      await look();
    } catch {
      lost();
      pause = 3000;
    }
    setTimeout(forever, pause);
  }
  setTimeout(forever, 500);
})();
