"""Images in the playground: picked, pasted, dropped, sent, kept with the conversation."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Request, expect

from tests.support.images.pictures import encoded, noise
from tests.support.images.vision_server import vision_server
from tests.support.pages.tab import Tab
from tests.support.server.fake_engine import FakeServer

pytestmark = pytest.mark.pages
# Gives the page files as a paste or a drop does.
GIVE = """([kind, files]) => {
    const data = new DataTransfer();
    for (const [name, type, text] of files) {
        const bytes = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
        data.items.add(new File([bytes], name, { type }));
    }
    const field = document.getElementById("message");
    const event = kind === "paste"
        ? new ClipboardEvent(kind, { clipboardData: data, bubbles: true, cancelable: true })
        : new DragEvent(kind, { dataTransfer: data, bubbles: true, cancelable: true });
    (kind === "paste" ? field : document.body).dispatchEvent(event);
    return event.defaultPrevented;
}"""


@pytest.fixture
def seeing(tmp_path: Path) -> Iterator[FakeServer]:
    with vision_server(tmp_path, context=4096) as server:
        yield server


def file(name: str, width: int, height: int, format: str = "PNG") -> list[str]:
    data = encoded(noise(width, height), format)
    return [name, f"image/{format.lower()}", base64.b64encode(data).decode()]


def give(tab: Tab, kind: str, *files: list[str]) -> bool:
    return tab.page.evaluate(GIVE, [kind, files])


def pending(tab: Tab) -> Any:
    return tab.page.get_by_role("list", name="Images to send").get_by_role("img")


def bodies(tab: Tab) -> list[dict[str, Any]]:
    """Of the chat completions that the page asks for from now on."""
    found: list[dict[str, Any]] = []

    def note(request: Request) -> None:
        if request.url.endswith("/v1/chat/completions"):
            found.append(request.post_data_json)

    tab.page.on("request", note)
    return found


@pytest.mark.parametrize("way", ["pick", "paste", "drop"])
def test_an_image_is_sent_before_the_text_and_shown(
    seeing: FakeServer, open_tab: Callable[..., Tab], way: str, tmp_path: Path
) -> None:
    tab = open_tab(seeing.url).open()
    expect(tab.page.locator("#sight")).to_be_visible()
    name, media_type, data = file("one.png", 96, 64)
    sent = bodies(tab)
    if way == "pick":
        path = tmp_path / name
        path.write_bytes(base64.b64decode(data))
        with tab.page.expect_file_chooser() as chooser:
            tab.page.get_by_role("button", name="Add images").click()
        chooser.value.set_files(path)
    else:
        assert give(tab, way, [name, media_type, data])
    expect(pending(tab)).to_have_count(1)
    tab.ask("What is it?")
    expect(pending(tab)).to_have_count(0)
    expect(tab.turns.first.get_by_role("img")).to_have_count(1)
    [image, text] = sent[0]["messages"][-1]["content"]
    assert image == {"type": "image_url", "image_url": {"url": f"data:{media_type};base64,{data}"}}
    assert text == {"type": "text", "text": "What is it?"}
    [answer] = tab.answers.locator(".figures").all_inner_texts()
    assert "prompt tokens" in answer
    tab.page.reload()
    expect(tab.turns.first.get_by_role("img")).to_be_visible()


def test_images_are_removed_edited_texts_keep_them_and_images_go_alone(
    seeing: FakeServer, open_tab: Callable[..., Tab]
) -> None:
    tab = open_tab(seeing.url).open()
    sent = bodies(tab)
    give(tab, "paste", file("one.png", 64, 64), file("two.jpg", 96, 96, "JPEG"))
    expect(pending(tab)).to_have_count(2)
    tab.page.get_by_role("button", name="Remove image 1").click()
    expect(pending(tab)).to_have_count(1)
    tab.ask("")
    assert [part["type"] for part in sent[0]["messages"][-1]["content"]] == ["image_url"]
    assert sent[0]["messages"][-1]["content"][0]["image_url"]["url"].startswith("data:image/jpeg")
    tab.page.locator(".user").get_by_role("button", name="Edit").click()
    editor = tab.page.get_by_label("Text to change")
    editor.fill("And now?")
    editor.press("Control+Enter")
    tab.settled()
    assert [part["type"] for part in sent[1]["messages"][-1]["content"]] == ["image_url", "text"]


def test_what_the_model_does_not_read_is_not_sent(
    seeing: FakeServer, open_tab: Callable[..., Tab]
) -> None:
    """Its limit is 4 images of a request, which has those of all messages before."""
    tab = open_tab(seeing.url).open()
    notice = tab.page.locator("#notice")
    assert give(tab, "drop", ["a.svg", "image/svg+xml", "PHN2Zy8+"])
    expect(notice).to_contain_text("a.svg is of type image/svg+xml")
    give(tab, "drop", *[file(f"{number}.png", 64, 64) for number in range(5)])
    expect(pending(tab)).to_have_count(4)
    expect(notice).to_contain_text("at most 4 images")
    assert give(tab, "drop", ["a.txt", "text/plain", "YQ=="])  # the browser does not open it
    expect(pending(tab)).to_have_count(4)
    assert not give(tab, "paste", ["a.txt", "text/plain", "YQ=="])


def test_images_of_earlier_messages_count_for_the_conversation(
    seeing: FakeServer, open_tab: Callable[..., Tab]
) -> None:
    tab = open_tab(seeing.url).open()
    give(tab, "paste", *[file(f"{number}.png", 64, 64) for number in range(3)])
    expect(pending(tab)).to_have_count(3)
    tab.ask("What are they?")
    give(tab, "paste", file("4.png", 64, 64), file("5.png", 64, 64))
    expect(pending(tab)).to_have_count(1)
    notice = tab.page.locator("#notice")
    expect(notice).to_contain_text("at most 4 images, and its messages have 3: begin a new one")
    tab.ask("And this?")
    assert len(seeing.engine.requests[-1].images) == 4


def test_a_message_that_is_sent_while_an_image_is_being_read_has_it(
    seeing: FakeServer, open_tab: Callable[..., Tab]
) -> None:
    tab = open_tab(seeing.url).open()
    tab.page.evaluate("""() => {
        const read = FileReader.prototype.readAsDataURL;
        window.goOn = [];
        FileReader.prototype.readAsDataURL = function (file) {
            window.goOn.push(() => read.call(this, file));
        };
    }""")
    give(tab, "paste", file("large.png", 64, 64))
    field = tab.page.get_by_label("Message", exact=True)
    field.fill("What is it?")
    field.press("Enter")
    field.press("Enter")  # which sends nothing more
    tab.page.wait_for_function("window.goOn.length === 1")
    assert seeing.engine.requests == []
    tab.page.evaluate("window.goOn.shift()()")
    expect(tab.turns.first.get_by_role("img")).to_have_count(1)
    tab.settled()
    [request] = seeing.engine.requests
    assert len(request.images) == 1


def test_a_broken_image_is_refused_by_the_server_in_the_answer(
    seeing: FakeServer, open_tab: Callable[..., Tab]
) -> None:
    tab = open_tab(seeing.url).open()
    give(tab, "paste", ["broken.png", "image/png", base64.b64encode(b"\x89PNG\r\n").decode()])
    tab.send("What is it?")
    expect(tab.answers.last.locator(".error")).to_contain_text("image")


def test_a_model_of_text_takes_no_image(fake: FakeServer, open_tab: Callable[..., Tab]) -> None:
    tab = open_tab(fake.url).open()
    expect(tab.page.get_by_role("button", name="Add images")).to_be_hidden()
    expect(tab.page.locator("#sight")).to_be_hidden()
    give(tab, "paste", file("one.png", 64, 64))
    expect(tab.page.locator("#notice")).to_contain_text("reads text alone")
    expect(pending(tab)).to_have_count(0)
