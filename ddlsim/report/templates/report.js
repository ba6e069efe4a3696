"use strict";
// Headings are buttons, so that Tab and Enter sort as well as a click does. Cells have the number to sort by in
// data-sort ("" where there is none: these go last either way); without it they are sorted as text.
for (const table of document.querySelectorAll("table.sortable")) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    const button = heading.querySelector("button");
    if (button) button.addEventListener("click", () => sort(table, headings, heading, column));
  });
}

function sort(table, headings, heading, column) {
  const before = heading.getAttribute("aria-sort");
  const largestFirst = "largestFirst" in heading.querySelector("button").dataset;
  const descending = before ? before === "ascending" : largestFirst;
  headings.forEach((other) => other.removeAttribute("aria-sort"));
  heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
  const rows = [...table.tBodies[0].rows].map((row) => [key(row.cells[column]), row]);
  rows.sort(([a], [b]) => {
    if (a === null || b === null) return (a === null) - (b === null);
    const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
    return descending ? -order : order;
  });
  table.tBodies[0].append(...rows.map(([, row]) => row));
}

function key(cell) {
  const value = cell.dataset.sort;
  if (value === undefined) return cell.textContent;
  return value === "" ? null : Number(value);
}

// A link to a run opens what it lies in.
function reveal() {
  const target = location.hash.length > 1 ? document.getElementById(location.hash.slice(1)) : null;
  for (let around = target; around; around = around.parentElement) {
    if (around.tagName === "DETAILS") around.open = true;
  }
  if (target) target.scrollIntoView();
}
addEventListener("hashchange", reveal);
reveal();
