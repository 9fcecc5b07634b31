// Shows the answer while the model says it. Without this script, the form gets the same page after the whole answer.
const post = (path, fields) => fetch(path, {method: "POST", body: new URLSearchParams(fields)});
const read = async (response) => new DOMParser().parseFromString(await response.text(), "text/html");

async function ask(form) {
  const answer = document.getElementById("answer"), under = document.getElementById("under");
  const fields = new FormData(form), response = await post("/playground/stream", fields);
  answer.replaceChildren();
  under.replaceChildren();
  document.getElementById("heading").hidden = false;
  if (!response.ok) return under.append((await read(response)).querySelector("main .wrong") ?? "The hub did not answer.");
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", source = null;
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    for (const piece of lines.map((line) => JSON.parse(line))) {
      if (source === null) { source = piece; continue; }
      const span = document.createElement("span");
      span.append(piece.text);
      span.title = piece.tokens;
      span.className = "t" + Math.floor(piece.sure * 5);
      span.tabIndex = answer.childElementCount ? -1 : 0;
      answer.append(span);
    }
  }
  fields.set("answer", answer.textContent);
  for (const key of ["release", "revision"]) fields.set(key, source[key] ?? "");
  under.replaceChildren(...(await read(await post("/playground", fields))).getElementById("under").childNodes);
}

// On the document, because a live page replaces its form.
document.addEventListener("submit", async (event) => {
  const form = event.target;
  if (form.id !== "ask") return;
  event.preventDefault();
  const button = form.querySelector("button");
  button.disabled = true;
  try { await ask(form); } catch (error) { document.getElementById("under").replaceChildren("The answer broke off: " + error); } finally { button.disabled = false; }
});

// One stop of the Tab key for the whole answer.
document.addEventListener("keydown", (event) => {
  const next = {ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling"}[event.key];
  if (next && event.target.parentElement?.id === "answer") event.target[next]?.focus();
});
