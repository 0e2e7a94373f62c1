"""A real headless Chromium, asked about a page: Debian's `apt-get install chromium`, or set CHROMIUM to another one."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

HOW_TO_INSTALL = "no Chromium: apt-get install -y chromium, or set CHROMIUM=/path/to/chrome"
PATIENCE = 120.0
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--allow-file-access-from-files",
)

# The page is loaded in a frame as wide as the device, since no window can be as narrow as a phone.
FRAME = """<!DOCTYPE html><meta charset="utf-8"><body style="margin:0">
<iframe id="page" style="width:{width}px;height:900px;border:0"></iframe><pre id="facts">none</pre>
<script>
const frame = document.getElementById("page");
frame.onload = () => {{
  const page = frame.contentDocument, view = frame.contentWindow;
  const facts = {facts};
  document.getElementById("facts").textContent = JSON.stringify(facts);
}};
frame.src = {address};
</script>"""

FACTS = """{
  width: page.documentElement.scrollWidth,
  images: [...page.images].map(i => [i.naturalWidth, i.getBoundingClientRect().right]),
  fetched: view.performance.getEntriesByType("resource").map(e => e.name).filter(n => !n.startsWith("data:")),
  headings: [...page.querySelectorAll("h1, h2, h3")].map(h => h.textContent),
  cells: [...page.querySelector("table").rows].map(r => [...r.cells].map(c => c.innerText)),
  smallest: Math.min(...[...page.querySelectorAll("p, li, td, th, figcaption, code")]
    .map(e => parseFloat(view.getComputedStyle(e).fontSize))),
  hidden: [...page.querySelectorAll("p, li, pre, h1, h2, h3, figcaption")]
    .filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.textContent.slice(0, 60)),
}"""


def find_chromium() -> str | None:
    return os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")


def chromium(folder: Path, *words: str) -> str:
    """Runs the browser with a profile of its own; what it printed."""
    program = find_chromium()
    assert program, HOW_TO_INSTALL
    command = [program, *FLAGS, f"--user-data-dir={folder / 'profile'}", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True).stdout


def facts_about(page: Path, folder: Path, width: int) -> dict[str, Any]:
    """What the browser finds on a page that is `width` pixels wide."""
    wrapper = folder / f"wrapper-{width}.html"
    wrapper.write_text(FRAME.format(width=width, facts=FACTS, address=json.dumps(page.as_uri())))
    size = f"--window-size={max(width, 600)},1000"
    shown = chromium(folder, size, "--virtual-time-budget=10000", "--dump-dom", wrapper.as_uri())
    found = re.search(r'<pre id="facts">(.*?)</pre>', shown, re.DOTALL)
    assert found and found[1] != "none", "the page did not load in the browser"
    text = found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&nbsp;", "\u00a0").replace("&amp;", "&")
    return json.loads(text)


def printed_pages(page: Path, folder: Path) -> int:
    """How many sheets the page prints on."""
    target = folder / "printed.pdf"
    chromium(folder, f"--print-to-pdf={target}", page.as_uri())
    return len(re.findall(rb"/Type\s*/Page\b", target.read_bytes()))
