// Shows moments, which the pages write in UTC, in the zone of the browser. A title has the UTC.
document.addEventListener("htmx:load", (event) => {
  for (const time of event.detail.elt.querySelectorAll("time:not([title])")) {
    time.title = time.textContent;
    time.textContent = new Date(time.dateTime).toLocaleString([], {dateStyle: "medium", timeStyle: "medium"});
  }
});
