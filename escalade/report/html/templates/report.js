"use strict";
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

// Figures by size, other cells by their text; what has neither comes last either way.
function sort(body, column, direction) {
  const keyed = [...body.rows].map((row) => {
    const text = row.cells[column].textContent.trim();
    return { row, text, size: parseFloat(text.replaceAll(",", "").replace("−", "-")) };
  });
  const sized = keyed.filter((one) => one.text).every((one) => !Number.isNaN(one.size));
  keyed.sort((one, other) => {
    if (!one.text || !other.text) return Number(!one.text) - Number(!other.text);
    const order = sized ? one.size - other.size : one.text.localeCompare(other.text, "en", { numeric: true });
    return direction * order;
  });
  body.append(...keyed.map((one) => one.row));
}

// What is folded is printed too.
window.addEventListener("beforeprint", () => {
  for (const part of document.querySelectorAll("details:not([open])")) {
    part.open = true;
    part.dataset.folded = "";
  }
});
window.addEventListener("afterprint", () => {
  for (const part of document.querySelectorAll("details[data-folded]")) {
    part.open = false;
    delete part.dataset.folded;
  }
});
