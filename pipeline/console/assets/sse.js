// Asks the hub for its stream of changes while somebody looks at the page, and passes each change on to htmx. A browser
// opens only six connections to one host: the stream of a hidden page would take one from the page that is looked at.
let seen = document.body.dataset.seen, stream = null;
function follow() {
  if (document.hidden) {
    stream?.close();
    stream = null;
  } else if (stream === null) {
    stream = new EventSource("/events?seen=" + encodeURIComponent(seen));
    stream.addEventListener("change", (event) => {
      seen = event.lastEventId;
      document.body.dispatchEvent(new Event("sse:change"));
    });
  }
}
document.addEventListener("visibilitychange", follow);
follow();
