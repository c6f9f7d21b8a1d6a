// The content of a folded part stays in a template until the part is opened, since most of the page's nodes are there.
function unfold(details) {
  const template = details.querySelector(":scope > template");
  if (!template) return;
  const made = [...template.content.children];
  template.replaceWith(template.content);
  made.forEach(prepare);
}

// The address has, after "#", the id of what was linked to or opened last, and the rows that the reader has asked for:
// whoever opens a copy of it sees the same.
function address() {
  const [id, rows = ""] = location.hash.slice(1).split("&rows=").map(decodeURIComponent);
  return {id, rows};
}

function setAddress(id, rows) {
  history.replaceState(null, "", `#${encodeURIComponent(id)}` + (rows ? `&rows=${encodeURIComponent(rows)}` : ""));
}

// Opens all parts around the table or plot that the address names, and scrolls to it.
function go() {
  const {id, rows} = address(), field = document.getElementById("only");
  if (rows && rows !== field.value) field.value = rows, filterAll();
  else if (field.value && !rows) setAddress(id, field.value);
  if (!id) return;
  const owner = document.getElementById(id) ? null : [...document.querySelectorAll("details > template")]
    .find(one => one.content.getElementById(id))?.parentElement;
  if (owner) unfold(owner);
  const target = document.getElementById(id);
  for (let one = target?.closest("details"); one; one = one.parentElement.closest("details")) one.open = true;
  target?.scrollIntoView();
}

// The number that a text begins with; null if it begins with none.
const numberOf = text => {
  const found = text.replaceAll(",", "").match(/^-?[\d.]+/);
  return found ? Number(found[0]) : null;
};

// Sorts a table by the column of a head: the largest first, and at the next click the smallest.
function sort(head) {
  const table = head.closest("table"), at = head.cellIndex, down = head.ariaSort !== "descending";
  for (const one of head.parentElement.cells) one.ariaSort = "none";
  head.ariaSort = down ? "descending" : "ascending";
  const text = row => row.cells[at].textContent;
  const compare = (a, b) => {
    const [x, y] = [numberOf(text(a)), numberOf(text(b))];
    if ((x === null) !== (y === null)) return x === null ? 1 : -1; // what has no number stands last, either way
    return (x === null ? text(b).localeCompare(text(a)) : y - x) * (down ? 1 : -1);
  };
  table.tBodies[0].append(...[...table.tBodies[0].rows].sort(compare));
}

// The reader asks for rows by typing parts of their names into the field "only".
const askedFor = () => document.getElementById("only").value.split(/[\s,]+/).filter(Boolean);
const isAsked = (cell, asked) => asked.some(one => cell.textContent.includes(one));
// A function of a cell: true if its text is the name of a row.
const nameTest = () => {
  const names = new Set([...document.getElementById("rows").options].map(one => one.value));
  return cell => names.has(cell.textContent.replace(/:.*/, ""));
};

// Hides columns and lines of a table that are of other rows. A table without any row that is asked for stays whole.
function filter(table) {
  const asked = askedFor(), named = nameTest();
  const hidden = cell => asked.length > 0 && named(cell) && !isAsked(cell, asked);
  const heads = [...table.tHead.rows[0].cells], lines = [...table.tBodies[0].rows];
  const columns = heads.map(hidden), rows = lines.map(line => [...line.cells].some(cell => cell.tagName === "TH" && hidden(cell)));
  const left = (all, gone) => !all.some((one, at) => named(one) && !gone[at]) && all.some(named);
  const keep = left(heads, columns) || lines.every((_, at) => rows[at]);
  for (const line of [table.tHead.rows[0], ...lines])
    [...line.cells].forEach((cell, at) => cell.hidden = !keep && columns[at]);
  lines.forEach((line, at) => line.hidden = !keep && rows[at]);
}

// Filters all tables. A corner of the page names the rows that are shown: a link may lead far below the field.
function filterAll() {
  const rows = document.getElementById("only").value;
  const asked = document.getElementById("asked");
  asked.textContent = `Rows: ${rows}`, asked.hidden = !rows;
  document.querySelectorAll("table:not(.facts)").forEach(filter);
  reveal();
}

// Opens each chapter that has a row that is asked for, at the first such row; closes it again when nothing is asked for.
function reveal() {
  const asked = askedFor(), named = nameTest();
  const find = part => [...part.querySelectorAll("th")].find(cell => named(cell) && isAsked(cell, asked));
  for (const chapter of document.querySelectorAll(".chapter")) {
    const folded = () => [...chapter.querySelectorAll("details > template")].find(one => find(one.content))?.parentElement;
    const place = find(chapter) ?? folded();
    for (const one of [chapter, ...chapter.querySelectorAll("details")]) {
      const holds = Boolean(place) && one.contains(place);
      if (holds === one.open || !holds && !one.dataset.asked) continue;
      one.dataset.asked = holds ? "yes" : "";
      if (holds) unfold(one);
      one.open = holds;
    }
  }
}

// Marks each table that is wider than the screen, and lets keys scroll it. Its first columns, which name the lines, stay
// in place while the figures scroll: as many of them as fit into half of the width.
const widths = new ResizeObserver(seen => seen.forEach(({target: t}) => {
  t.classList.toggle("wide", t.scrollWidth > t.clientWidth) ? t.tabIndex = 0 : t.removeAttribute("tabindex");
  const table = t.firstElementChild, heads = [...table.rows[0]?.cells ?? []];
  let left = 0;
  heads.forEach((head, at) => {
    const stays = head.matches(".key") && (at === 0 || left + head.offsetWidth <= t.clientWidth / 2);
    for (const line of table.rows) if (line.cells[at]) line.cells[at].style.left = stays ? `${left}px` : "";
    left += stays ? head.offsetWidth : Infinity;
  });
}));

// The text behind a figure: its own details, those that all figures of its line share, and the command of its run.
const completed = new WeakSet();

function complete(cell) {
  const row = cell.parentElement;
  if (row.title) row.title = withCommand(row.title);
  if (!cell.title || completed.has(cell)) return cell.title || row.title;
  completed.add(cell);
  if (row.title) cell.title += `; ${row.title}`;
  return cell.title = withCommand(cell.title);
}

function withCommand(text) {
  const run = [...document.getElementById("runs").options].find(one => text.includes(one.label));
  return run && !text.endsWith(run.value) ? `${text}; made by: ${run.value}` : text;
}

// Prepares the tables of a part of the page that has come into view: their heads for clicks, widths and the filter.
function prepare(part) {
  for (const scroll of part.querySelectorAll(".scroll")) widths.observe(scroll);
  for (const table of part.querySelectorAll("table:not(.facts)")) {
    if (table.tBodies[0].rows.length > 1)
      for (const head of table.tHead.rows[0].cells) head.tabIndex = 0, head.ariaSort = "none";
    filter(table);
  }
}

addEventListener("DOMContentLoaded", () => {
  const said = document.getElementById("said"), field = document.getElementById("only");
  prepare(document.body);
  field.addEventListener("input", () => filterAll() ?? setAddress(address().id, field.value));
  addEventListener("toggle", event => {
    if (!event.target.open || event.target.dataset.asked) return;
    unfold(event.target);
    const first = event.target.id || event.target.querySelector(".title")?.getAttribute("href").slice(1);
    if (first && !event.target.contains(document.getElementById(address().id))) // that is what go() opened
      setAddress(first, field.value);
  }, true);
  addEventListener("hashchange", go);
  addEventListener("click", event => {
    const head = event.target.closest("thead th[tabindex]"), cell = event.target.closest("td");
    if (head) sort(head);
    const details = cell ? complete(cell) : "";
    said.textContent = details ? `${cell.textContent}: ${details}` : "";
  });
  addEventListener("pointerover", event => {
    const cell = event.target.closest("td[title], tr[title] > *");
    if (cell) complete(cell);
  });
  addEventListener("keydown", event => {
    if (event.key === "Enter" && event.target.matches("thead th[tabindex]")) sort(event.target);
  });
  go();
});
