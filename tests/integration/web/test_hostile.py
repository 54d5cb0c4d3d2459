"""A hostile page in the browser that holds the token can read, submit and cancel nothing."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from tests.integration.queue_fixture import until
from tests.integration.web.conftest import Site
from tests.integration.web.hostile import another_site
from tests.scale import some

pytestmark = [pytest.mark.needs("chromium"), pytest.mark.usefixtures("unmeasured")]

# Each script returns what it could read: an empty string is nothing.
READ = {
    "fetch": """async (at) => {
        try { return await (await fetch(`${at}/v1/jobs`, {credentials: "include"})).text() } catch { return "" }
    }""",
    "blind fetch": """async (at) => {
        try {
            const got = await fetch(`${at}/v1/jobs`, {credentials: "include", mode: "no-cors"});
            return got.status + await got.text() === "0" ? "" : "seen";
        } catch { return "" }
    }""",
    "the page by fetch": """async (at) => {
        try { return await (await fetch(`${at}/`, {credentials: "include"})).text() } catch { return "" }
    }""",
    "with a header of its own": """async (at) => {
        try {
            const headers = {Authorization: "Bearer guess"};
            return await (await fetch(`${at}/v1/jobs`, {credentials: "include", headers})).text();
        } catch { return "" }
    }""",
    "script": """(at) => new Promise((done) => {
        const script = document.createElement("script");
        script.src = `${at}/static/dom.js`;
        script.type = "module";
        script.onload = () => done("run");
        script.onerror = () => done("");
        document.body.append(script);
    })""",
    "plain script": """(at) => new Promise((done) => {
        const script = document.createElement("script");
        script.src = `${at}/v1/jobs`;
        script.onload = () => done("run");
        script.onerror = () => done("");
        document.body.append(script);
    })""",
    "style": """(at) => new Promise((done) => {
        const link = document.createElement("link");
        link.rel = "stylesheet";
        link.href = `${at}/static/page.css`;
        link.onload = () => done("styled");
        link.onerror = () => done("");
        document.head.append(link);
    })""",
    "image": """(at) => new Promise((done) => {
        const image = new Image();
        image.onload = () => done("seen");
        image.onerror = () => done("");
        image.src = `${at}/static/icon.svg`;
    })""",
    "frame": """(at) => new Promise((done) => {
        const frame = document.createElement("iframe");
        frame.onload = () => {
            try { done(frame.contentDocument === null ? "" : frame.contentDocument.body.innerText.trim()) }
            catch { done("") }
        };
        frame.src = `${at}/`;
        document.body.append(frame);
    })""",
    "events": """(at) => new Promise((done) => {
        const events = new EventSource(`${at}/v1/events?watch=/jobs`, {withCredentials: true});
        events.onmessage = (event) => { events.close(); done(event.data) };
        events.onopen = () => { events.close(); done("open") };
        events.onerror = () => { events.close(); done("") };
    })""",
    "web socket": """(at) => new Promise((done) => {
        const ws = new WebSocket(`${at.replace("http", "ws")}/v1/events?watch=/jobs`);
        ws.onopen = () => done("open");
        ws.onmessage = (event) => done(event.data);
        ws.onerror = () => done("");
    })""",
    "worker": """async (at) => {
        try { new SharedWorker(`${at}/static/dom.js`); return "run" } catch { return "" }
    }""",
}
# Each script tries to cancel job 1 and to submit another job; its result is ignored.
CHANGE = {
    "fetch": """async (at) => {
        const sent = {method: "POST", credentials: "include", headers: {"Content-Type": "application/json"}};
        await fetch(`${at}/v1/jobs/cancel`, {...sent, body: '{"ids": "1"}'}).catch(() => 0);
        await fetch(`${at}/v1/submissions`, {...sent, body: '{"command": ["true"]}'}).catch(() => 0);
    }""",
    "blind fetch": """async (at) => {
        for (const type of ["text/plain", "text/plain; application/json", "application/x-www-form-urlencoded"]) {
            const sent = {method: "POST", credentials: "include", mode: "no-cors", headers: {"Content-Type": type}};
            await fetch(`${at}/v1/jobs/cancel`, {...sent, body: '{"ids": "1"}'}).catch(() => 0);
            await fetch(`${at}/v1/submissions`, {...sent, body: '{"command": ["true"]}'}).catch(() => 0);
        }
        const typeless = {method: "POST", credentials: "include", mode: "no-cors"};
        await fetch(`${at}/v1/jobs/cancel`, {...typeless, body: new Blob(['{"ids": "1"}'])}).catch(() => 0);
    }""",
    "beacon": """(at) => {
        navigator.sendBeacon(`${at}/v1/jobs/cancel`, '{"ids": "1"}');
        try {
            const json = {type: "application/json"};
            navigator.sendBeacon(`${at}/v1/jobs/cancel`, new Blob(['{"ids": "1"}'], json));
        } catch { }
    }""",
    "forms": """(at) => Promise.all(["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"].map(
        (type) => new Promise((done) => {
            const frame = document.createElement("iframe");
            frame.name = at + type;
            document.body.append(frame);
            const form = document.createElement("form");
            Object.assign(form, {method: "POST", action: `${at}/v1/jobs/cancel`, enctype: type, target: at + type});
            const field = document.createElement("input");
            field.name = '{"ids": "1", "x": "';
            field.value = '"}';
            form.append(field);
            document.body.append(form);
            frame.onload = done;
            form.submit();
        })
    ))""",
    "get": """async (at) => {
        for (const path of ["/v1/jobs/cancel?ids=1", "/v1/stop", "/v1/submissions"]) {
            await fetch(at + path, {credentials: "include", mode: "no-cors"}).catch(() => 0);
        }
    }""",
}


# A request that the browser never completes counts as nothing read.
PATIENCE = "(at) => Promise.race([(%s)(at), new Promise((done) => setTimeout(() => done(''), 5000))])"


@pytest.fixture
def hostile(request: pytest.FixtureRequest, context: BrowserContext, page: Page) -> Iterator[Page]:
    """A second tab beside the open page: same-site for cookies, or cross-site."""
    with another_site() as port:
        tab = context.new_page()
        tab.goto(f"http://{getattr(request, 'param', '127.0.0.1')}:{port}/")
        yield tab
        tab.close()


@pytest.mark.parametrize("hostile", some(["127.0.0.1", "localhost", "evil.localhost"], 2), indirect=True)
def test_a_hostile_page_reads_nothing_and_changes_nothing(hostile: Page, page: Page, site: Site) -> None:
    job = site.queue.submit("true", name="secret-name", hold=True)
    assert job == 1
    responses: list[tuple[str, int]] = []
    hostile.on("response", lambda response: responses.append((response.url, response.status)))
    places = (site.origin, site.origin.replace("127.0.0.1", "localhost"), f"http://evil.localhost:{site.port}")
    for at in places:
        for method, script in READ.items():
            assert hostile.evaluate(PATIENCE % script, at) == "", f"{method} of {at}"
        for script in CHANGE.values():
            hostile.evaluate(PATIENCE % script, at)
    refused = {status for url, status in responses if "/v1/" in url}
    assert (f"{site.origin}/v1/jobs/cancel", 403) in responses
    assert refused <= {401, 403, 405}, responses
    assert site.queue.counts() == {"held": 1}
    # The open page still works, with its token.
    same = """async () => {
        const headers = {"Content-Type": "application/json", Authorization: `Bearer ${sessionStorage.token}`};
        const sent = {method: "POST", headers, body: '{"ids": "1"}'};
        return [(await fetch("/v1/session", {headers})).status, (await fetch("/v1/jobs/cancel", sent)).status];
    }"""
    assert page.evaluate(same) == [200, 200]
    until(lambda: site.queue.counts() == {"cancelled": 1}, "the page's own cancel")


def test_a_hostile_page_cannot_access_a_window_that_it_opens(hostile: Page, site: Site) -> None:
    with hostile.context.expect_page() as opened:
        hostile.evaluate("(at) => { window.opened = window.open(at) }", f"{site.origin}/")
    window = opened.value
    # The window shows the page to the user, but its opener cannot read it.
    window.wait_for_function("() => document.scripts.length > 0")
    assert hostile.evaluate("() => window.opened.closed")
    assert hostile.evaluate("() => { try { return window.opened.document.body.innerText } catch { return '' } }") == ""
    assert window.evaluate("() => window.opener") is None


@pytest.mark.full
def test_a_link_with_the_token_on_another_site_opens_the_page(context: BrowserContext, site: Site) -> None:
    with another_site() as port:
        tab = context.new_page()
        for to in (site.url, f"{site.origin}/"):
            tab.goto(f"http://evil.localhost:{port}/")
            tab.evaluate("(to) => { location.href = to }", to)
            expect(tab.locator("#host")).not_to_be_empty()
            assert tab.url == f"{site.origin}/"


def test_another_port_of_the_host_gets_nothing(hostile: Page, page: Page, site: Site) -> None:
    with hostile.expect_request(lambda request: True) as sent:
        hostile.reload()
    assert not {"cookie", "authorization"} & sent.value.all_headers().keys()
    assert page.context.cookies() == []
    assert hostile.evaluate("() => document.cookie + JSON.stringify({...sessionStorage, ...localStorage})") == "{}"
    heard = """() => new Promise((done) => {
        const tabs = new BroadcastChannel("gpuyard");
        tabs.onmessage = ({data}) => done(data);
        tabs.postMessage("which token?");
        setTimeout(() => done(""), 1000);
    })"""
    assert hostile.evaluate(heard) == ""
    assert site.token not in page.url


def test_another_tab_gets_the_token_from_an_open_one(page: Page, site: Site, context: BrowserContext) -> None:
    tab = context.new_page()
    tab.goto(f"{site.origin}/#/submit")
    expect(tab.locator("#host")).not_to_be_empty()
    tab.reload()
    expect(tab.locator("#host")).not_to_be_empty()
    expect(tab.locator("#connection")).to_have_text("live")


def test_without_the_token_the_page_explains_how_to_get_it(context: BrowserContext, site: Site) -> None:
    tab = context.new_page()
    tab.goto(f"{site.origin}/")
    expect(tab.locator("#toasts")).to_contain_text("gpuyard web")
    assert tab.evaluate("async () => (await fetch('/v1/status')).status") == 401
