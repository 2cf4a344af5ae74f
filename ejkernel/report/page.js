"use strict";
(() => {
  const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];
  const root = document.documentElement;
  root.classList.add("js");

  // --- light and dark: the system's wish, unless the reader has another one ----------------------
  const remembered = {
    get() { try { return localStorage.getItem("ejkernel-theme"); } catch { return null; } },
    set(value) { try { localStorage.setItem("ejkernel-theme", value); } catch { /* no storage here */ } },
  };
  const isDark = () =>
    root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  if (remembered.get()) root.dataset.theme = remembered.get() === "dark" ? "dark" : "light";
  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    remembered.set(root.dataset.theme);
  });

  // --- tabs ------------------------------------------------------------------------------------
  const tabs = all("[role=tab]");
  const panels = tabs.map((tab) => document.getElementById(tab.getAttribute("aria-controls")));
  const show = (index, focus) => {
    tabs.forEach((tab, i) => {
      tab.setAttribute("aria-selected", String(i === index));
      tab.tabIndex = i === index ? 0 : -1;
      panels[i].hidden = i !== index;
    });
    if (focus) tabs[index].focus();
    hideTip();
  };
  tabs.forEach((tab, i) => {
    tab.addEventListener("click", () => {
      show(i, true);
      note(panels[i].id);
    });
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: tabs.length - 1 }[event.key];
      if (step === undefined) return;
      event.preventDefault();
      show((step + tabs.length) % tabs.length, true);
    });
  });
  // The address keeps the place, where a page has an address: in a notebook's cell it has none.
  function note(name) { try { history.replaceState(null, "", `#${name}`); } catch { /* no address */ } }
  const go = (name) => {
    const wanted = document.getElementById(name);
    const index = wanted ? panels.findIndex((panel) => panel.contains(wanted)) : -1;
    show(Math.max(index, 0), false);
    if (index < 0 || wanted === panels[index]) return;
    if (wanted.tagName === "DETAILS") wanted.open = true;
    wanted.scrollIntoView();
  };
  const follow = () => go(decodeURIComponent(location.hash.slice(1)));
  addEventListener("hashchange", follow);
  all("a[href^='#']").forEach((link) => {
    link.addEventListener("click", (event) => {
      event.preventDefault();
      const name = link.getAttribute("href").slice(1);
      go(name);
      note(name);
    });
  });

  // --- tooltips: for the mouse, the finger and the keyboard; only ever as text ---------------------
  const tip = document.getElementById("tip");
  let owner = null;
  function hideTip() {
    tip.hidden = true;
    if (owner) owner.removeAttribute("aria-describedby");
    owner = null;
  }
  function showTip(element, x, y) {
    if (owner !== element) {
      hideTip();
      owner = element;
      tip.textContent = element.dataset.tip;
      tip.hidden = false;
      element.setAttribute("aria-describedby", "tip");
    }
    const room = 12;
    const left = Math.min(x + room, innerWidth - tip.offsetWidth - room);
    const below = y + room + tip.offsetHeight < innerHeight;
    tip.style.left = `${Math.max(room, left)}px`;
    tip.style.top = `${Math.max(room, below ? y + room : y - room - tip.offsetHeight)}px`;
  }
  const tipped = (event) => event.target instanceof Element && event.target.closest("[data-tip]");
  document.addEventListener("pointermove", (event) => {
    const element = tipped(event);
    if (element) showTip(element, event.clientX, event.clientY);
    else if (owner && owner !== document.activeElement) hideTip();
  });
  document.addEventListener("pointerdown", (event) => {
    const element = tipped(event);
    if (element) showTip(element, event.clientX, event.clientY);
    else hideTip();
  });
  document.addEventListener("focusin", (event) => {
    const element = tipped(event);
    if (!element || !element.matches(":focus-visible")) return;
    const box = element.getBoundingClientRect();
    showTip(element, box.left + Math.min(box.width / 3, 220), box.bottom - 8);
  });
  document.addEventListener("focusout", hideTip);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });
  addEventListener("scroll", () => { if (owner !== document.activeElement) hideTip(); }, { passive: true });

  // --- plots: one stop for Tab, arrows from row to row --------------------------------------------
  all(".rows").forEach((list) => {
    const rows = [...list.children];
    rows.forEach((row, i) => { row.tabIndex = i ? -1 : 0; });
    list.addEventListener("keydown", (event) => {
      const visible = rows.filter((row) => row.offsetParent);
      const at = visible.indexOf(document.activeElement);
      const next = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: visible.length - 1 }[event.key];
      if (at < 0 || next === undefined || !visible[next]) return;
      event.preventDefault();
      visible[at].tabIndex = -1;
      visible[next].tabIndex = 0;
      visible[next].focus();
    });
  });
  all("[data-filter]").forEach((button) => {
    button.addEventListener("click", () => {
      const on = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(on));
      button.closest(".plot").classList.toggle(`without-${button.dataset.filter}`, !on);
    });
  });
  all(".show-all").forEach((button) => {
    button.addEventListener("click", () => {
      button.closest(".plot").classList.remove("folded");
      button.remove();
    });
  });

  // --- maps of the search space: the pair that is chosen --------------------------------------------
  all("select[data-maps]").forEach((select) => {
    const maps = all("[data-map]", document.getElementById(select.dataset.maps));
    const choose = () => maps.forEach((map) => { map.hidden = map.dataset.map !== select.value; });
    select.addEventListener("change", choose);
    choose();
  });

  addEventListener("beforeprint", () => {
    panels.forEach((panel) => { panel.hidden = false; });
    all("details.operation").forEach((details) => { details.open = true; });
  });
  addEventListener("afterprint", follow);
  follow();
})();
