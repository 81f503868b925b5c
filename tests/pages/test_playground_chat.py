"""A conversation with the built-in model: send, stop, retry, edit, branch, keep."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.support.pages.tab import Tab
from tests.support.server.server_process import Server

pytestmark = pytest.mark.pages
CAPITAL = "What is the capital of France?"
PARIS = "The capital of France is Paris."
LONG = "Count from 1 to 60."


def test_an_answer_is_streamed_with_its_figures(tab: Tab):
    tab.send(LONG)
    partial = tab.answers.locator(".answer-text")
    expect(partial).to_contain_text("5")
    assert "60" not in partial.inner_text(), "it came at once"
    assert "60" in tab.text()
    figures = tab.answers.locator(".figures").inner_text()
    assert "prompt tokens" in figures and "tokens/s" in figures and "first after" in figures
    assert "complete" in tab.page.locator("#live").inner_text()


def test_enter_sends_and_shift_enter_begins_a_line(tab: Tab):
    tab.message.press_sequentially("Hello!")
    tab.message.press("Shift+Enter")
    assert tab.message.input_value() == "Hello!\n"
    expect(tab.turns).to_have_count(0)
    tab.message.press("Enter")
    expect(tab.turns).to_have_count(2)
    assert tab.text()
    assert tab.message.input_value() == ""


@pytest.mark.parametrize("by", ["Escape", "button"])
def test_stop_keeps_what_was_written_and_ends_the_request(tab: Tab, server: Server, by: str):
    before = server.metric("wavefill_aborted_total")
    tab.send("Count from 1 to 90.")
    expect(tab.answers.locator(".answer-text")).to_contain_text("3")
    if by == "Escape":
        tab.page.keyboard.press("Escape")
    else:
        tab.page.get_by_role("button", name="Stop", exact=True).click()
    assert "3" in tab.text() and "90" not in tab.text()
    assert "stopped" in tab.answers.locator(".figures").inner_text()
    server.wait_until(lambda: server.metric("wavefill_aborted_total") == before + 1)
    assert tab.ask(CAPITAL) == PARIS


def test_retry_adds_a_version_and_both_can_be_read(tab: Tab):
    tab.ask(CAPITAL)
    tab.set("max_tokens", "3")
    tab.button("Retry").click()
    short = tab.text()
    assert short != PARIS and PARIS.startswith(short.strip())
    assert "cut off" in tab.answers.locator(".figures").inner_text()
    expect(tab.page.locator(".versions")).to_contain_text("2/2")
    tab.button("Version before").click()
    expect(tab.answers.locator(".answer-text")).to_have_text(PARIS)
    assert tab.page.evaluate("document.activeElement.closest('.turn') !== null"), "focus is lost"
    tab.button("Next version").click()
    assert tab.text() == short


def test_an_edited_message_is_answered_and_the_old_one_stays(tab: Tab):
    tab.ask(CAPITAL)
    tab.page.locator(".user").get_by_role("button", name="Edit").click()
    editor = tab.page.get_by_label("Text to change")
    editor.fill("What is the capital of Italy?")
    editor.press("Control+Enter")
    assert "Rome" in tab.text()
    expect(tab.turns).to_have_count(2)
    tab.page.locator(".user").get_by_role("button", name="Version before").click()
    assert tab.text() == PARIS


def test_escape_leaves_a_message_unchanged(tab: Tab):
    tab.ask(CAPITAL)
    tab.page.locator(".user").get_by_role("button", name="Edit").click()
    tab.page.get_by_label("Text to change").press("Escape")
    expect(tab.page.locator(".user-text")).to_have_text(CAPITAL)


def test_an_answer_can_be_rewritten_and_is_what_the_model_then_reads(tab: Tab):
    tab.ask("My name is Anna.")
    tab.answers.get_by_role("button", name="Edit").click()
    tab.page.get_by_label("Text to change").fill("Hello, Bertha!")
    tab.button("Save as a new version").click()
    expect(tab.answers.locator(".answer-text")).to_have_text("Hello, Bertha!")
    assert "edited" in tab.answers.locator(".figures").inner_text()
    with tab.page.expect_request("**/v1/chat/completions") as asked:
        tab.ask(CAPITAL)
    sent = [message["content"] for message in asked.value.post_data_json["messages"]]
    assert sent == ["My name is Anna.", "Hello, Bertha!", CAPITAL]


def test_a_branch_goes_on_by_itself(tab: Tab):
    tab.ask(CAPITAL)
    tab.ask("And of Italy?")
    tab.page.get_by_role("button", name="Branch", exact=True).first.click()
    expect(tab.turns).to_have_count(2)
    assert "Oslo" in tab.ask("And of Norway?")
    expect(tab.turns).to_have_count(4)
    items = tab.page.locator(".conversations li")
    expect(items).to_have_count(2)
    items.filter(has_not=tab.page.locator('[aria-current="true"]')).locator(".title").click()
    expect(tab.page.locator(".user-text").last).to_have_text("And of Italy?")


def test_conversations_outlive_the_page_and_are_in_no_other_browser(
    tab: Tab, open_tab: Callable[..., Tab], server: Server
):
    tab.ask(CAPITAL)
    tab.page.get_by_role("button", name="New conversation").click()
    expect(tab.turns).to_have_count(0)
    tab.ask("Hello!")
    expect(tab.page.locator(".conversations li")).to_have_count(2)
    tab.page.reload()
    expect(tab.page.locator(".user-text")).to_have_text("Hello!")
    tab.page.get_by_role("button", name=CAPITAL, exact=True).click()
    expect(tab.answers.locator(".answer-text")).to_have_text(PARIS)
    other = open_tab(server.url).open()
    expect(other.page.locator(".conversations li")).to_have_count(0)


def test_an_answer_goes_on_while_another_conversation_is_open(tab: Tab):
    tab.send(LONG)
    expect(tab.answers.locator(".answer-text")).to_contain_text("3")
    tab.page.get_by_role("button", name="New conversation").click()
    assert tab.ask(CAPITAL) == PARIS
    tab.page.get_by_role("button", name=LONG, exact=True).click()
    expect(tab.page.locator(".user-text")).to_have_text(LONG)
    assert tab.text().endswith("60.")
    expect(tab.answers.locator(".figures")).not_to_contain_text("stopped")


def test_a_conversation_is_renamed_and_deleted(tab: Tab):
    tab.ask(CAPITAL)
    menu = tab.page.get_by_label(f"More on {CAPITAL}")
    menu.click()
    tab.page.get_by_role("button", name="Rename").click()
    tab.page.get_by_label("New title").fill("Capitals")
    tab.page.get_by_label("New title").press("Enter")
    expect(tab.page.locator(".conversations .title")).to_have_text("Capitals")
    tab.page.get_by_label("More on Capitals").click()
    tab.page.get_by_role("button", name="Delete", exact=True).click()
    tab.page.get_by_role("button", name="Really delete").click()
    expect(tab.page.locator(".conversations li")).to_have_count(0)
    tab.page.reload()
    expect(tab.turns).to_have_count(0)


def test_an_exported_file_is_imported_by_another_browser(
    tab: Tab, open_tab: Callable[..., Tab], server: Server, tmp_path: Path
):
    tab.ask(CAPITAL)
    tab.button("Retry").click()
    tab.settled()
    with tab.page.expect_download() as download:
        tab.page.get_by_role("button", name="Export all").click()
    file = tmp_path / "export.json"
    download.value.save_as(file)
    assert json.loads(file.read_text())["format"] == "wavefill-conversations"
    other = open_tab(server.url).open()
    other.page.locator('input[type="file"]').set_input_files(file)
    expect(other.page.locator(".user-text")).to_have_text(CAPITAL)
    expect(other.page.locator(".versions")).to_contain_text("2/2")
    assert other.ask("And of Italy?")


def test_a_file_of_something_else_is_refused(tab: Tab, tmp_path: Path):
    file = tmp_path / "other.json"
    file.write_text('{"conversations": 3}')
    tab.page.locator('input[type="file"]').set_input_files(file)
    expect(tab.page.locator("#notice")).to_contain_text("other.json was not imported")
