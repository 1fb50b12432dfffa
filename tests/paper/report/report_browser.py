"""A real browser for the report's page, a server that nothing on it may ask, and results that try to."""

import contextlib
import http.server
import json
import shutil
import threading
import time

from tests.paper.report.report_rows import flatness, pair, row, write

FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
         "--window-size=1280,900"]  # fmt: skip


def there_is_a_browser():
    return (shutil.which("chromium") or shutil.which("google-chrome")) and shutil.which("chromedriver")


def open_browser(folder):
    """Chromium with a profile of its own; what it logs can be read."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome")
    for flag in (*FLAGS, f"--user-data-dir={folder}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    driver.set_script_timeout(120)
    return driver


@contextlib.contextmanager
def listening():
    """The address of a server on this machine, and the list of what it was asked for."""
    asked = []

    class Note(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Note)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


def hostile_texts(url):
    """Texts that try to leave an element, an attribute, a style, a script, a drawing."""
    return [
        f'x"><img src={url}/tag><script>hacked=1</script>',
        f"red); background: url({url}/style); --x: (",
        f'"/><style>body {{ background: url({url}/sheet) }}</style>',
        f"</script><script>hacked=1;fetch('{url}/script')</script>",
        f"' onmouseover='hacked=1' style='background:url({url}/attribute)",
        f"]]></svg><image href='{url}/image'/><!--",
        f"{{{{ 7 * 7 }}}}{{% include '{url}' %}}",
        f"javascript:fetch('{url}/link')",
    ]


def hostile_results(folder, url, texts=None):
    """Results, measurements and costs with these texts wherever a text may stand."""
    texts = texts or hostile_texts(url)
    rows = []
    for n, text in enumerate(texts):
        for zeta in (0.0, 0.1, 0.2, 0.3):
            made = row(40.0 + n, zeta=zeta)
            made["config"] |= {"dataset": text, "partition": text, "algorithm": text, f"key {text}": n, "model": text}
            rows.append(made | {"device": text, "version": text, "precision": text, "method": text})
    rows[0]["config"][f"key {texts[0]}"] = texts[-1]
    rows += [r | {"config": r["config"] | {"algorithm": t}} for r, t in zip(pair(40.0, 50.0), texts, strict=False)]
    write(folder / f"a{texts[0].replace('/', '')[:40]}.jsonl", rows)
    for number, text in enumerate(texts):
        record = flatness()
        record["run"] |= {"algorithm": text, "method": text, "partition": text, "dataset": text}
        record["models"][text] = record["models"]["all"]
        blocks = record["models"]["all"]["layers"]["blocks"]
        blocks[text] = blocks["fc"]
        (folder / f"{number}-flatness.json").write_text(json.dumps(record))
    steps = [{"where": t, "model": t, "kind": t, "ms": 2.0, "ratio": 1.98} for t in texts]
    (folder / "cost.json").write_text(json.dumps({"steps": steps}))


def escaped(browser, page, asked):
    """Open a page and use it; None, or what got out of its place."""
    browser.get(page.as_uri())
    buttons = "document.querySelectorAll('button').forEach(b => { b.click(); b.click() })"
    browser.execute_script(f"{buttons}; document.querySelectorAll('details').forEach(d => d.open = true)")
    time.sleep(0.3)
    foreign = "img, iframe, object, embed, form, base, script[src], link:not([rel=icon]), meta[http-equiv=refresh]"
    found = browser.execute_script(f"""return [typeof hacked, document.querySelectorAll("{foreign}").length,
        document.querySelectorAll("script").length, document.querySelectorAll("style").length,
        [...document.links].filter(a => a.protocol !== "file:").length,
        [...document.querySelectorAll("*")].filter(e => [...e.attributes].some(a => a.name.startsWith("on"))).length]
    """)
    own_styles = 1 + browser.execute_script("return document.querySelectorAll('svg style').length")
    if found != ["undefined", 0, 1, own_styles, 0, 0]:
        return f"hacked, foreign elements, scripts, styles, links, handlers: {found}"
    return f"asked for {', '.join(asked)}" if asked else None
