// A live page: asks its own server for what was added, and shows it.

const EVERY_MS = 2000;
let version = DATA.version, stamp = DATA.stamp;

async function follow() {
  const lost = document.getElementById("lost");
  try {
    const answer = await fetch(`data?version=${encodeURIComponent(version)}`, { cache: "no-store" });
    if (!answer.ok) throw new Error(answer.statusText);
    show(await answer.json());
    lost.hidden = true;
  } catch {
    lost.hidden = false; // its server has ended, or is restarted: it may come again
  }
  setTimeout(follow, EVERY_MS);
}

function show(news) {
  const list = document.getElementById("status");
  list.replaceChildren();
  for (const text of news.status) html(list, "li", {}, text);
  if (news.stamp !== stamp) { location.reload(); return; } // another plan, or a timeline
  if (news.version === version) return;
  version = news.version;
  shown = { axes: news.axes, charts: news.charts };
  drawCharts();
  document.getElementById("tables").innerHTML = news.tables; // escaped where it was made
}

setTimeout(follow, EVERY_MS);
