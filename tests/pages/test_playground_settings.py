"""What the settings do: parameters, formats, tools, reasoning, log-probabilities, comparisons."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
from playwright.sync_api import expect

from tests.support.pages.tab import Tab
from tests.support.server.tiny_chat_tools import HARD, HARD_ANSWER, HARD_THOUGHT

pytestmark = pytest.mark.pages
CAPITAL = "What is the capital of France?"
PARIS = "The capital of France is Paris."
VALUES = {
    "temperature": ("0.5", 0.5),
    "top_p": ("0.9", 0.9),
    "top_k": ("20", 20),
    "min_p": ("0.05", 0.05),
    "seed": ("7", 7),
    "n": ("1", 1),
    "max_tokens": ("40", 40),
    "min_tokens": ("1", 1),
    "stop": ("END\nSTOP", ["END", "STOP"]),
    "stop_token_ids": ("5, 6", [5, 6]),
    "include_stop_str_in_output": ("true", True),
    "ignore_eos": ("false", False),
    "presence_penalty": ("0.1", 0.1),
    "frequency_penalty": ("0.1", 0.1),
    "repetition_penalty": ("1.05", 1.05),
    "logit_bias": ('{"42": -100}', {"42": -100}),
    "bad_words": ("foo\nbar", ["foo", "bar"]),
    "skip_special_tokens": ("true", True),
    "tool_choice": ("auto", None),  # means nothing without tools
    "parallel_tool_calls": ("true", None),
    "thinking_token_budget": ("50", 50),
    "include_reasoning": ("true", True),
    "verbosity": ("medium", "medium"),
    "reasoning_effort": ("low", "low"),
    "chat_template_kwargs": ('{"enable_thinking": false}', {"enable_thinking": False}),
    "top_logprobs": ("3", 3),
    "priority": ("1", 1),
    "truncate_prompt_tokens": ("-1", -1),
    "truncation_side": ("left", "left"),
    "cache_salt": ("mine", "mine"),
}


def test_every_parameter_reaches_the_server_as_it_was_typed(tab: Tab):
    named = set(tab.page.eval_on_selector_all("#settings [name]", "all => all.map(e => e.name)"))
    assert named == {*VALUES, "allowed_token_ids", "response_format", "tools"}
    for name, (typed, _) in VALUES.items():
        tab.set(name, typed)
    tab.page.get_by_label("System prompt").fill("Be short.")
    with tab.page.expect_request("**/v1/chat/completions") as asked:
        tab.ask(CAPITAL)
    body = asked.value.post_data_json
    assert asked.value.response().status == 200, tab.answers.inner_text()
    assert body["messages"][0] == {"role": "system", "content": "Be short."}
    expected = {name: value for name, (_, value) in VALUES.items() if value is not None}
    assert {name: body.get(name) for name in expected} == expected
    own = {"model", "messages", "stream", "stream_options", "timings", "logprobs"}
    assert set(body) == {*expected, *own}


def test_nothing_is_sent_that_was_not_set(tab: Tab):
    with tab.page.expect_request("**/v1/chat/completions") as asked:
        tab.ask(CAPITAL)
    own = {"model", "messages", "stream", "stream_options", "timings"}
    assert set(asked.value.post_data_json) == own


def test_every_parameter_has_a_label_and_a_sentence(tab: Tab):
    tab.unfold()
    fields = tab.page.locator("#settings .field")
    for index in range(fields.count()):
        field = fields.nth(index)
        assert field.locator("label").inner_text().strip()
        assert len(field.locator(".help").inner_text()) > 20 or index == 0


def test_a_value_out_of_range_is_named_and_nothing_is_sent(tab: Tab):
    tab.set("temperature", "3")
    tab.send(CAPITAL)
    expect(tab.page.locator("#notice")).to_have_text("Temperature: It can be at most 2.")
    expect(tab.turns).to_have_count(0)
    assert tab.message.input_value() == CAPITAL, "what was typed is lost"
    focused = tab.page.evaluate("document.activeElement.name")
    assert focused == "temperature"


def test_what_the_server_refuses_is_shown_in_its_words(tab: Tab):
    tab.set("max_tokens", "5")
    tab.set("min_tokens", "9")
    tab.ask(CAPITAL)
    expect(tab.answers.locator(".error")).to_contain_text("min_tokens")
    tab.set("min_tokens", "")
    with tab.page.expect_request("**/v1/chat/completions") as asked:
        assert tab.ask("Hello!")
    roles = [message["role"] for message in asked.value.post_data_json["messages"]]
    assert roles == ["user", "user"], "an answer that failed is none"
    tab.answers.first.get_by_role("button", name="Retry").click()
    assert tab.text()
    expect(tab.turns).to_have_count(2)


def test_the_answer_follows_a_schema(tab: Tab):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    tab.set("response_format", "json_schema")
    tab.page.get_by_label("The schema, expression, texts or grammar").fill(json.dumps(schema))
    tab.ask('Give me JSON with the keys "name" and "age": Anna is 31 years old.')
    answer = json.loads(tab.answers.locator("pre").inner_text())
    assert set(answer) == {"name", "age"} and isinstance(answer["age"], int)


def test_a_schema_that_is_no_json_is_refused_on_the_page(tab: Tab):
    tab.set("response_format", "json_schema")
    tab.page.get_by_label("The schema, expression, texts or grammar").fill("{nope")
    tab.send(CAPITAL)
    expect(tab.page.locator("#notice")).to_contain_text("Format: This is no JSON")


def test_the_answer_is_one_of_several_texts(tab: Tab):
    tab.set("response_format", "choice")
    tab.page.get_by_label("The schema, expression, texts or grammar").fill("Rome\nOslo")
    assert tab.ask(CAPITAL) in ("Rome", "Oslo")


def test_a_tool_is_called_and_its_result_is_told(tab: Tab):
    tab.unfold()
    tab.page.locator('.field:has([name="tools"])').get_by_role("button").click()
    tab.ask("What is the weather in Paris?")
    expect(tab.page.locator(".call-name")).to_have_text("calls get_weather")
    assert json.loads(tab.page.locator(".call pre").inner_text()) == {"city": "Paris"}
    result = tab.page.get_by_label("Result of get_weather")
    result.fill('{"temperature": 21, "condition": "sunny"}')
    with tab.page.expect_request("**/v1/chat/completions") as asked:
        result.press("Control+Enter")
    called, given = asked.value.post_data_json["messages"][-2:]
    assert given["role"] == "tool" and given["tool_call_id"] == called["tool_calls"][0]["id"]
    assert "21" in tab.text() and "sunny" in tab.text()
    expect(tab.turns).to_have_count(4)


def test_calls_without_a_result_do_not_end_the_conversation(tab: Tab):
    tab.unfold()
    tab.page.locator('.field:has([name="tools"])').get_by_role("button").click()
    tab.ask("What is the weather in Paris?")
    assert tab.ask(CAPITAL)
    expect(tab.answers.last.locator(".error")).to_have_count(0)


def test_reasoning_is_folded(tab: Tab):
    tab.set("reasoning_effort", "medium")
    answer = tab.ask(HARD)
    reasoning = tab.answers.locator(".reasoning")
    assert answer == HARD_ANSWER
    assert reasoning.evaluate("details => details.open") is False
    reasoning.locator("summary").click()
    assert reasoning.locator(".text").inner_text().strip() == HARD_THOUGHT


def test_a_token_shows_its_alternatives_and_their_shares(tab: Tab):
    tab.set("top_logprobs", "5")
    tab.ask(CAPITAL)
    tab.button("Tokens").click()
    tokens = tab.page.locator(".token")
    assert "".join(tokens.all_inner_texts()).startswith(PARIS[:20])
    tokens.nth(2).hover()
    bubble = tab.page.get_by_role("tooltip")
    expect(bubble.locator("tr")).to_have_count(5)
    shares = bubble.locator(".number").all_inner_texts()
    assert all("%" in share for share in shares)
    tokens.first.focus()
    before = bubble.inner_text()
    tab.page.keyboard.press("ArrowRight")
    expect(tokens.nth(1)).to_be_focused()
    assert bubble.inner_text() != before
    expect(bubble).to_be_in_viewport(ratio=1)


def test_two_settings_answer_side_by_side_and_each_goes_on(tab: Tab):
    tab.page.get_by_role("button", name="Compare").click()
    expect(tab.page.get_by_role("tab")).to_have_count(2)
    tab.set("max_tokens", "2")
    tab.page.get_by_label("Model", exact=True).select_option("other-name")
    tab.send(CAPITAL)
    expect(tab.answers).to_have_count(2)
    first, second = tab.text(0), tab.text(1)
    assert first == PARIS and first.startswith(second.strip()) and second != first
    assert tab.answers.nth(1).locator(".answer-name").inner_text() == "B · other-name"
    left, right = (tab.answers.nth(index).bounding_box() for index in (0, 1))
    assert left and right and left["y"] == right["y"] and left["x"] < right["x"]
    sent: list[list[str]] = []
    tab.page.on(
        "request",
        lambda asked: (
            sent.append([message["content"] for message in asked.post_data_json["messages"]])
            if asked.method == "POST"
            else None
        ),
    )
    tab.send("And of Italy?")
    expect(tab.answers).to_have_count(4)
    tab.settled()
    assert sorted(messages[1].strip() for messages in sent) == sorted([first, second.strip()])


def test_all_go_on_with_the_answer_that_is_chosen(tab: Tab):
    tab.set("n", "3")
    tab.set("temperature", "2")
    tab.set("max_tokens", "8")
    tab.send("Tell me something.")
    expect(tab.answers).to_have_count(3)
    tab.settled()
    tab.answers.nth(1).get_by_role("button", name="Go on with this").click()
    chosen = tab.page.evaluate("document.querySelectorAll('.answer')[1].classList.contains('kept')")
    assert chosen
    tab.set("n", "1")
    with tab.page.expect_request("**/v1/chat/completions") as asked:
        tab.send(CAPITAL)
    tab.settled()
    sent = asked.value.post_data_json["messages"][1]["content"].split()
    assert sent == tab.text(1).split()


@pytest.mark.parametrize("language", ["curl", "Python", "JavaScript"])
def test_a_request_that_is_copied_runs_and_gets_the_same_answer(tab: Tab, language: str):
    tab.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.set("temperature", "0")
    tab.set("top_k", "5")
    tab.set("stop", 'it\'s "over"\\')
    tab.ask(CAPITAL)
    tab.page.get_by_text("Copy as").click()
    tab.button(language).click()
    expect(tab.button("Copied")).to_be_visible()
    program = tab.page.evaluate("navigator.clipboard.readText()")
    assert '"stream"' not in program and "timings" not in program
    command = {
        "curl": ["sh", "-c", program],
        "Python": [sys.executable, "-c", program],
        "JavaScript": ["node", "--input-type=module", "-e", program],
    }[language]
    if shutil.which(command[0]) is None:
        pytest.skip(f"there is no {command[0]} here")
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ)
    assert PARIS in ran.stdout, ran.stderr


def test_a_setting_that_stays_keeps_its_answers(tab: Tab):
    tab.page.get_by_role("button", name="Compare").click()
    tab.set("max_tokens", "2")
    tab.send(CAPITAL)
    expect(tab.answers).to_have_count(2)
    tab.settled()
    short = tab.text(1)
    tab.page.get_by_role("tab", name="Setting A").click()
    tab.page.get_by_role("button", name="Remove setting A").click()
    with tab.page.expect_request("**/v1/chat/completions") as asked:
        tab.send("And of Italy?")
    tab.settled()
    expect(tab.answers).to_have_count(3)
    assert asked.value.post_data_json["messages"][1]["content"].strip() == short.strip()
    assert asked.value.post_data_json["max_tokens"] == 2
