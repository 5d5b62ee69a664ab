"use strict";
// A link to a section opens it.
function openTarget() {
  document.querySelector(`${location.hash || "#overview"} > details.section`)?.setAttribute("open", "");
}
addEventListener("hashchange", openTarget);
openTarget();
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((one) => { one.open = true; }));

for (const table of document.querySelectorAll("table")) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    const button = document.createElement("button");
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const down = heading.getAttribute("aria-sort") === "ascending";
      headings.forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", down ? "descending" : "ascending");
      sort(table.tBodies[0], column, down ? -1 : 1);
    });
  });
}

// Figures by size, then other cells by their text; what is empty comes last either way.
function sort(body, column, direction) {
  const keyed = [...body.rows].map((row) => {
    const text = row.cells[column].textContent.trim();
    const isFigure = /^[\d,]*\.?\d+(e[+-]?\d+)?\s*[×%ᵗ]?$/.test(text);
    return { row, text, size: parseFloat(text.replaceAll(",", "")), rank: text ? Number(!isFigure) : 2 };
  });
  keyed.sort((one, other) => {
    if (one.rank !== other.rank) return one.rank - other.rank;
    const order = one.rank ? one.text.localeCompare(other.text, "en", { numeric: true }) : one.size - other.size;
    return direction * order;
  });
  body.append(...keyed.map((one) => one.row));
}
