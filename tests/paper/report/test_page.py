"""The page in a real browser: no errors, toggles, values under the pointer, tables, dark, three widths and print."""

import base64
import json
import re
import time

import pytest

from fedman.paper.report import command
from tests.paper.report.report_browser import escaped, hostile_results, listening, open_browser, there_is_a_browser
from tests.paper.report.report_rows import flatness, pair, row, write

CURVES = '[id="cifar100-dir0.3-curves-1"]'

pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
WebDriverWait = pytest.importorskip("selenium.webdriver.support.wait").WebDriverWait
pytestmark = [
    pytest.mark.skipif(not there_is_a_browser(), reason="chromium and chromedriver are not installed"),
    pytest.mark.xdist_group("browser"),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    results = folder / "results"
    results.mkdir()
    rows = [r for s in (0, 1) for p in ("dir0.3", "iid") for r in pair(40.0 + s, 52.0 + s, partition=p, seed=s)]
    rows += [*pair(50.0, 55.0, "feddc"), row(51.0, zeta=0.3), row(53.0, zeta=0.6), row(51.0, man_logits=False)]
    write(results / "a.jsonl", rows)
    for number, record in enumerate([flatness(), flatness(zeta=0.15, top=44.0, trace=4400.0), flatness("fedsam")]):
        (results / f"{number}-flatness.json").write_text(json.dumps(record))
    command(results, folder / "report.html")
    return folder / "report.html"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    driver = open_browser(tmp_path_factory.mktemp("chromium"))
    yield driver
    driver.quit()


@pytest.fixture
def browser(chromium, page):
    resize(chromium, 1280)
    media(chromium)
    chromium.get(page.as_uri())
    yield chromium
    errors = [entry for entry in chromium.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
    assert errors == []


def resize(browser, width):
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def media(browser, kind="", scheme="light"):
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": kind, "features": features})


def js(browser, script, *arguments):
    return browser.execute_script(f"return {script}", *arguments)


def displayed(browser, series):
    """Whether the curve and the band of a series are drawn in the first panel."""
    shown = js(browser, f"""[...document.querySelectorAll(`{CURVES} [data-series="{series}"]`)]
                            .map(e => getComputedStyle(e).display !== "none")""")  # fmt: skip
    assert shown
    assert len(set(shown)) == 1
    return shown[0]


def hover(browser, selector, across, down):
    """Move the pointer over a drawing, at these shares of its axes; what the tip says, line by line."""
    x, y = spot(browser, selector, across, down)
    for dx in (3, 0):
        event = {"type": "mouseMoved", "x": x + dx, "y": y}
        browser.execute_cdp_cmd("Input.dispatchMouseEvent", event)
    return tip(browser)


def spot(browser, selector, across, down):
    """Scroll to a drawing; the place at these shares of its axes."""
    script = """((selector, across, down) => {
        const drawing = document.querySelector(`${selector} .drawing`), svg = drawing.querySelector("svg");
        drawing.scrollIntoView({block: "center", behavior: "instant"});
        const box = JSON.parse(drawing.dataset.hover).box, r = svg.getBoundingClientRect();
        const scale = r.width / svg.viewBox.baseVal.width;
        return [r.left + (box[0] + across * (box[2] - box[0])) * scale,
                r.top + (box[1] + down * (box[3] - box[1])) * scale];
    })(...arguments)"""
    return js(browser, script, selector, across, down)


def tip(browser):
    """What the tip says, line by line."""
    return js(browser, "document.getElementById('tip').hidden ? '' : document.getElementById('tip').innerText").split(
        "\n"
    )


def click(browser, toggle):
    browser.execute_script("document.querySelector(arguments[0]).click()", f'#cifar100 [data-toggle="{toggle}"]')


def test_toggles_hide_and_show_curves(browser):
    assert displayed(browser, "fedavg man")
    click(browser, "fedavg")
    assert [displayed(browser, s) for s in ("fedavg plain", "fedavg man", "feddc man")] == [False, False, True]
    click(browser, "plain")
    click(browser, "fedavg")
    assert [displayed(browser, s) for s in ("fedavg plain", "fedavg man", "feddc plain")] == [False, True, False]
    click(browser, "plain")
    assert displayed(browser, "fedavg plain")


def test_the_pointer_shows_the_values_of_its_round(browser):
    shown = hover(browser, CURVES, 0.5, 0.5)
    assert shown[0] == "round 250"
    text = " ".join(shown)
    # rows rise linearly to 40 and 41, 52 and 53, 50, 55 at round 500: half of the mean at round 250
    for name, value in (("FedAvg", "20.25"), ("FedAvg+MAN", "26.25"), ("FedDC", "25.00"), ("FedDC+MAN", "27.50")):
        assert re.search(rf"{re.escape(name)}\s+{value}(\s|$)", text), text
    click(browser, "feddc")
    assert "FedDC" not in " ".join(hover(browser, CURVES, 0.4, 0.5))
    browser.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": 2, "y": 2})
    assert js(browser, "document.getElementById('tip').hidden")


def test_the_arrow_keys_do_too(browser):
    browser.execute_script(f"document.querySelector('{CURVES} .drawing').focus()")
    for _ in range(2):
        browser.switch_to.active_element.send_keys("\ue014")
    assert js(browser, "document.getElementById('tip').innerText").startswith("round 15")


def test_dots_and_cells_have_values_too(browser):
    spot = js(browser, """(() => {
        const d = JSON.parse(document.querySelector('[id="cifar100-dir0.3-overview"] .drawing').dataset.hover);
        const [x, y] = d.points.find(p => p[2].startsWith("FedAvg+MAN"));
        return [(x - d.xlim[0]) / (d.xlim[1] - d.xlim[0]), 1 - (y - d.ylim[0]) / (d.ylim[1] - d.ylim[0])];
    })()""")  # fmt: skip
    assert hover(browser, '[id="cifar100-dir0.3-overview"]', *spot) == ["FedAvg+MAN 52.50 %"]
    assert hover(browser, "#cifar100-iid-partition", 0.305, 0.505) == ["client 30, class 50: 5 samples"]
    centre = hover(browser, '[id="cifar100-dir0.3-fedavg-plain-map"]', 0.5, 0.5)
    assert centre[0] == "direction 1 0.00, direction 2 0.00"
    assert re.split(r"\s+", " ".join(centre).strip())[-2:] == ["loss", "0.000"]
    corner = hover(browser, '[id="cifar100-dir0.3-fedavg-plain-map"]', 0.01, 0.01)
    assert corner[0] == "direction 1 −1.00, direction 2 1.00"


def test_the_tip_of_a_touch_stays_until_the_next(browser):
    x, y = spot(browser, CURVES, 0.5, 0.5)
    touch(browser, x, y)
    assert tip(browser)[0] == "round 250"
    touch(browser, *spot(browser, "#cifar100-iid-partition", 0.305, 0.505))
    assert tip(browser) == ["client 30, class 50: 5 samples"]
    touch(browser, 5, 5)
    assert tip(browser) == [""]


def touch(browser, x, y):
    """A finger that comes and goes."""
    browser.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [{"x": x, "y": y}]})
    browser.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})


def test_light_and_dark(browser):
    ground = "getComputedStyle(document.body).backgroundColor"
    line = f"""{CURVES} [data-series="fedavg man"] path[style*="stroke: var"]"""
    curve = f"getComputedStyle(document.querySelector(`{line}`)).stroke"
    legend = "getComputedStyle(document.querySelector('[data-toggle=fedavg] .dot')).backgroundColor"
    light = js(browser, ground), js(browser, curve)
    assert js(browser, legend) == light[1]
    media(browser, scheme="dark")
    WebDriverWait(browser, 60).until(lambda b: js(b, ground) != light[0])
    dark = js(browser, ground), js(browser, curve)
    assert light[1] != dark[1]
    assert js(browser, legend) == dark[1]
    browser.execute_script("document.getElementById('theme').click()")
    assert (js(browser, ground), js(browser, curve)) == light
    browser.refresh()
    assert (js(browser, ground), js(browser, curve)) == light, "what was chosen survives a reload"
    browser.execute_script("localStorage.clear()")


@pytest.mark.parametrize("width", [360, 800, 1280])
def test_three_widths(browser, width):
    resize(browser, width)
    browser.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert js(browser, "document.documentElement.scrollWidth") <= width, "no sideways scrolling"
    assert js(browser, f"document.querySelector('{CURVES} svg').clientWidth") > 290
    targets = "button, a, summary, label, input[type=search]"
    small = js(browser, f"""[...document.querySelectorAll("{targets}")].filter(e => e.offsetParent)
        .map(e => [e.textContent, e.getBoundingClientRect()]).filter(([_, r]) => r.height < 24 || r.width < 24)
        .map(([text, r]) => `${{text}} ${{r.width}} ${{r.height}}`)""")  # fmt: skip
    assert small == [], "large enough for a finger"


def test_one_small_sweep_fills_the_width(chromium, tmp_path):
    write(tmp_path / "a.jsonl", [*pair(40.0, 52.0, dataset="digits"), *pair(41.0, 50.0, "feddc", dataset="digits")])
    command(tmp_path / "a.jsonl", tmp_path / "report.html")
    for width in (1280, 800):
        resize(chromium, width)
        chromium.get((tmp_path / "report.html").as_uri())
        left, right = js(chromium, """(() => {
            const boxes = [...document.querySelectorAll("#digits .group > *")].map(e => e.getBoundingClientRect());
            return [Math.min(...boxes.map(b => b.left)), Math.max(...boxes.map(b => b.right))];
        })()""")  # fmt: skip
        assert right - left > 0.9 * width
    assert js(chromium, "document.documentElement.scrollWidth") <= 800


def column(browser, number):
    """The texts of a column of the runs' table, of the rows shown."""
    rows = "[...document.querySelectorAll('#all-runs tbody tr')].filter(r => !r.hidden)"
    return js(browser, f"{rows}.map(r => r.cells[{number}].textContent)")


def test_tables_sort_and_filter(browser):
    browser.execute_script("document.querySelector('#runs details').open = true")
    before = column(browser, 6)
    assert len(before) == 13
    head = "document.querySelectorAll('#all-runs .sort')[6].click()"
    browser.execute_script(head)
    assert column(browser, 6) == sorted(before, key=float)
    browser.execute_script(head)
    assert column(browser, 6) == sorted(before, key=float, reverse=True)
    assert js(browser, "document.querySelector('#all-runs th[aria-sort]').textContent") == "accuracy %"
    browser.execute_script(head)
    assert column(browser, 6) == before
    field = browser.find_element("css selector", "#all-runs input[type=search]")
    field.send_keys("FedAvg+MAN iid")
    assert column(browser, 6) == ["52.00", "53.00"]
    assert js(browser, "document.querySelector('#all-runs .filter').innerText").strip() == "2 of 13"
    field.clear()
    field.send_keys("no such run")
    assert column(browser, 6) == []


def test_runs_that_are_ticked_are_compared(browser):
    browser.execute_script("document.querySelector('#runs details').open = true")
    for number in (0, 1, 2):
        browser.execute_script(f"document.querySelectorAll('#all-runs .tick input')[{number}].click()")
    drawn = "document.querySelectorAll('.ticked polyline').length"
    assert js(browser, drawn) == 3
    labels = js(browser, "[...document.querySelectorAll('.ticked button')].map(b => b.textContent.trim())")
    names = [f"{method}, seed {seed} ×" for method, seed in zip(column(browser, 2), column(browser, 5), strict=True)]
    assert [label.replace("ζ 0, ", "").replace("ζ 0.15, ", "") for label in labels] == names[:3]
    browser.execute_script("document.querySelector('.ticked .drawing').focus()")
    browser.switch_to.active_element.send_keys("\ue014")
    assert tip(browser)[0].startswith("round ")
    assert len(tip(browser)) >= 4
    browser.execute_script("document.querySelector('.ticked button').click()")
    assert js(browser, drawn) == 2
    assert not js(browser, "document.querySelector('#all-runs .tick input').checked")


def test_print(browser):
    media(browser, "print", "dark")
    hidden = js(
        browser, "['nav', '.buttons', '#theme', '.files'].map(s => getComputedStyle(document.querySelector(s)).display)"
    )
    assert set(hidden) == {"none"}
    assert js(browser, "getComputedStyle(document.body).color") == "rgb(31, 36, 48)", "print is light"
    assert js(browser, f"getComputedStyle(document.querySelector(`{CURVES} [data-series=legend]`)).display") != "none"
    media(browser, "", "dark")
    printed = browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})
    pdf = base64.b64decode(printed["data"])
    assert pdf.startswith(b"%PDF")
    assert 3 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 14


def test_every_section_of_the_contents_is_there(browser):
    links = js(browser, "[...document.querySelectorAll('nav a')].map(a => a.getAttribute('href'))")
    assert links == ["#summary", "#cifar100", "#studies", "#flatness", "#cost", "#runs"]
    assert js(
        browser, "[...document.querySelectorAll('nav a')].every(a => document.querySelector(a.getAttribute('href')))"
    )
    assert js(browser, "document.querySelectorAll('[id]').length === new Set([...document.querySelectorAll('[id]')]"
                       ".map(e => e.id)).size"), "ids are unique"  # fmt: skip


@pytest.fixture
def outside():
    with listening() as found:
        yield found


@pytest.mark.slow
def test_nothing_in_a_file_escapes_onto_the_page(chromium, outside, tmp_path):
    url, asked = outside
    (tmp_path / "results").mkdir()
    hostile_results(tmp_path / "results", url)
    command(tmp_path / "results", tmp_path / "report.html")
    assert escaped(chromium, tmp_path / "report.html", asked) is None
    assert js(chromium, "document.querySelectorAll('figure').length") > 20, "the page is there"
    assert [entry for entry in chromium.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []


def test_the_policy_holds_where_escaping_would_fail(chromium, outside, page):
    """What an injection could add is neither fetched nor run."""
    url, asked = outside
    chromium.get(page.as_uri())
    inject = """
        document.body.insertAdjacentHTML("beforeend", `<img src="URL/img"><i style="background: url(URL/style)">x</i>
            <style>h1 { background: url(URL/sheet) }</style><iframe src="URL/frame"></iframe>
            <img src="data:," onerror="hacked = 1"><form action="URL/form"><button>x</button></form>`);
        const script = document.createElement("script");
        script.textContent = "hacked = 1; fetch('URL/fetch')";
        document.body.append(script);
    """
    chromium.execute_script(inject.replace("URL", url))
    chromium.execute_script("document.querySelector('form button').click()")
    told = ""

    def refused(browser):
        nonlocal told
        told += str(browser.get_log("browser"))
        return "Content Security Policy" in told

    WebDriverWait(chromium, 60).until(refused)
    time.sleep(0.3)
    assert asked == []
    assert js(chromium, "typeof hacked") == "undefined"
    chromium.get_log("browser")
