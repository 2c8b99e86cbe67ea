"""`/v1/completions` and `/v1/chat/completions` answer what `spec.generate` does, in the form that clients read.

Tokens as text and bytes, how likely they are, answers as they grow, and stop strings.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from helpers import tiny
from helpers.http_server import NAME, Running, running
from helpers.saved_folders import checkpoint_folder
from helpers.tokenizers import KINDS, PLAIN
from selfspec.decode.text_stream import continuation
from selfspec.serve.chat.template import ChatTemplate
from selfspec.serve.choice import Choice, Counts, StopStrings
from selfspec.serve.events import Committed, Finished, TokenLogprobs
from selfspec.serve.grammar import Grammars
from selfspec.serve.served import TokenTexts

PROMPTS = ("Once upon a time", "Tom had a big red ball.", "One day, a dog")
NEW = 12


def generated(server: Running, prompt: str, new: int = NEW, **options: Any) -> list[int]:
    ids = server.tokenizer(prompt, return_tensors="pt").input_ids
    options = options or {"do_sample": False}
    found: list[int] = server.spec.generate(ids, max_new_tokens=new, **options).sequences[0, ids.shape[1] :].tolist()
    return found


def text_of(server: Running, prompt: str, tokens: list[int]) -> str:
    ids = server.tokenizer(prompt).input_ids
    whole = server.tokenizer.decode([*ids, *tokens], skip_special_tokens=True)
    assert isinstance(whole, str)
    return whole.removeprefix(prompt)


def test_greedy_text_is_that_of_generate(server: Running) -> None:
    reply = server.complete(prompt=list(PROMPTS), max_tokens=NEW, temperature=0)
    assert reply.status == 200
    expected = [text_of(server, prompt, generated(server, prompt)) for prompt in PROMPTS]
    assert [choice["text"] for choice in reply.body["choices"]] == expected
    assert [choice["index"] for choice in reply.body["choices"]] == [0, 1, 2]
    assert {choice["finish_reason"] for choice in reply.body["choices"]} == {"length"}
    ids = [server.tokenizer(prompt).input_ids for prompt in PROMPTS]
    for prompt, texts in ((ids, expected), (ids[0], expected[:1])):
        choices = server.complete(prompt=prompt, max_tokens=NEW, temperature=0).body["choices"]
        assert [choice["text"] for choice in choices] == texts


# So hot that tokens behind the first fifty are drawn: nothing is filtered that a request does not name.
@pytest.mark.parametrize("asked", [{"temperature": 0.9, "top_p": 0.95}, {"temperature": 2.0}], ids=str)
def test_seeded_text_is_that_of_generate(server: Running, asked: dict[str, Any]) -> None:
    options: dict[str, Any] = {"do_sample": True, "top_k": 0, "accept": "coupled", **asked}
    body = {"prompt": PROMPTS[0], "max_tokens": NEW, "seed": 5, "n": 2, **asked}
    choices = server.complete(**body).body["choices"]
    for index, choice in enumerate(choices):
        assert choice["text"] == text_of(server, PROMPTS[0], generated(server, PROMPTS[0], seed=5 + index, **options))
    assert choices == server.complete(**body).body["choices"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("said", "meant"),
    [({"top_k": -1}, {}), ({"top_k": 0}, {}), ({"suffix": ""}, {}), ({"top_p": 0}, {"temperature": 0})],
    ids=str,
)
def test_what_clients_of_other_servers_say_means_what_it_means_there(
    server: Running, said: dict[str, Any], meant: dict[str, Any], stream: bool
) -> None:
    body = {"prompt": PROMPTS[0], "max_tokens": NEW, "temperature": 2.0, "seed": 5}
    expected = server.complete(**{**body, **meant}).body["choices"][0]["text"]
    reply = server.complete(**body, **said, stream=stream)
    found = [event["choices"][0]["text"] for event in reply.events] if stream else [reply.body["choices"][0]["text"]]
    assert "".join(found) == expected


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"structured_outputs": {"choice": ["yes!", "no way"]}, "skip_special_tokens": True}, ["yes!", "no way"]),
        ({"guided_choice": ["a|b"]}, ["a|b"]),
        ({"guided_regex": "[x-z]z"}, ["xz", "yz", "zz"]),
        ({"structured_outputs": {"json": {"const": 5}}}, ["5"]),
        ({"guided_json": {"enum": ["Bern", None]}}, ['"Bern"', "null"]),
    ],
    ids=str,
)
def test_answers_fit_what_vllms_clients_ask_for(server: Running, fields: dict[str, Any], said: list[str]) -> None:
    pytest.importorskip("llguidance")
    reply = server.complete(**fields, max_tokens=20)
    assert reply.status == 200, reply.raw
    assert reply.body["choices"][0]["text"] in said


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_stream_says_the_same(server: Running, temperature: float) -> None:
    body = {"prompt": list(PROMPTS), "max_tokens": NEW, "temperature": temperature, "seed": 1}
    whole = server.complete(**body).body
    events = server.complete(**body, stream=True, stream_options={"include_usage": True}).events
    texts, reasons = [""] * 3, [None] * 3
    for event in events[:-1]:
        assert event["usage"] is None
        (choice,) = event["choices"]
        assert reasons[choice["index"]] is None
        texts[choice["index"]] += choice["text"]
        reasons[choice["index"]] = choice["finish_reason"]
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert reasons == ["length"] * 3
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 3 * NEW == whole["usage"]["completion_tokens"]
    assert {event["id"] for event in events} == {events[0]["id"]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0])
def test_stop_strings_end_an_answer_and_are_not_sent(server: Running, stream: bool, logprobs: int | None) -> None:
    tokens = generated(server, PROMPTS[0], 40)
    whole = text_of(server, PROMPTS[0], tokens)
    stop = whole[20:23] if logprobs is None else whole[9:12]
    body = {"prompt": PROMPTS[0], "max_tokens": 40, "temperature": 0, "stop": [stop, "never said"]}
    reply = server.complete(**body, logprobs=logprobs, stream=stream)
    choices = [event["choices"][0] for event in reply.events] if stream else reply.body["choices"]
    said = whole[: whole.find(stop)]
    assert "".join(choice["text"] for choice in choices) == said
    assert choices[-1]["finish_reason"] == "stop"
    if logprobs is not None:
        # The tokens of the stop string among them.
        assert "".join(token for choice in choices for token in choice["logprobs"]["tokens"]).startswith(said + stop)
    if not stream:
        until = next(count for count in range(41) if stop in text_of(server, PROMPTS[0], tokens[:count]))
        assert reply.body["usage"]["completion_tokens"] == until < 40
    server.settled()


def test_end_tokens(server: Running) -> None:
    tokens = generated(server, PROMPTS[0])
    body = {"prompt": PROMPTS[0], "max_tokens": NEW, "temperature": 0, "stop_token_ids": [tokens[4]]}
    for further in ({}, {"ignore_eos": True}):
        reply = server.complete(**body, **further).body
        assert reply["choices"][0]["finish_reason"] == "stop"
        assert reply["usage"]["completion_tokens"] == tokens.index(tokens[4]) + 1


def test_bias_and_penalties_change_the_text(server: Running) -> None:
    first = server.tokenizer.convert_tokens_to_ids(server.tokenizer.tokenize("Once upon a time"))[-1]
    forced = server.complete(temperature=0, max_tokens=3, logit_bias={str(first): 100}).body["choices"][0]["text"]
    assert forced == server.tokenizer.decode([first] * 3) or len(set(forced.split())) == 1
    plain, *others = (
        server.complete(temperature=0, max_tokens=40, **fields).body["choices"][0]["text"]
        for fields in ({}, {"presence_penalty": 2}, {"frequency_penalty": 2})
    )
    assert plain not in others


def test_penalties_of_the_checkpoint_are_not_used(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    before = server.complete(temperature=0, max_tokens=20).body["choices"]
    monkeypatch.setattr(server.spec.model.generation_config, "repetition_penalty", 1.9)
    assert server.complete(temperature=0, max_tokens=20).body["choices"] == before


def test_logprobs_of_an_answer_are_the_models_own(server: Running) -> None:
    reply = server.complete(prompt=PROMPTS[1], temperature=0, max_tokens=4, logprobs=2)
    whole = torch.tensor([server.tokenizer(PROMPTS[1]).input_ids + generated(server, PROMPTS[1], 4)])
    scores = server.spec.model(whole).logits[0, :-1].float().log_softmax(-1)
    expected = scores.gather(1, whole[0, 1:, None])[-4:, 0].tolist()
    found = reply.body["choices"][0]["logprobs"]
    assert found["token_logprobs"] == pytest.approx(expected, abs=1e-4)
    assert len(found["tokens"]) == len(found["top_logprobs"]) == len(found["text_offset"]) == 4
    for top, own in zip(found["top_logprobs"], found["token_logprobs"], strict=True):
        assert len(top) == 2
        assert max(top.values()) == own


@pytest.mark.parametrize("adds", [True, False])
def test_an_empty_prompt_is_the_bos_token(server: Running, monkeypatch: pytest.MonkeyPatch, adds: bool) -> None:
    monkeypatch.setattr(server.tokenizer, "add_bos_token", adds)
    assert bool(server.tokenizer("").input_ids) == adds
    reply = server.complete(prompt="", temperature=0, max_tokens=2)
    assert reply.status == 200, reply.raw
    assert reply.body["usage"]["prompt_tokens"] == 1


def test_every_token_stands_where_its_offset_says(server: Running) -> None:
    """Behind the tokens before it, streamed too; of the prompt there is nothing."""
    body = {"prompt": list(PROMPTS[:2]), "n": 2, "temperature": 1, "seed": 3, "max_tokens": 16, "logprobs": 1}
    choices = server.complete(**body, ignore_eos=True).body["choices"]
    events = server.complete(**body, ignore_eos=True, stream=True).events
    for index, choice in enumerate(choices):
        found = choice["logprobs"]
        assert "".join(found["tokens"]) == choice["text"]
        for token, offset, top in zip(found["tokens"], found["text_offset"], found["top_logprobs"], strict=True):
            assert choice["text"][offset : offset + len(token)] == token
            assert token in top
        pieces = [event["choices"][0]["logprobs"] for event in events if event["choices"][0]["index"] == index]
        for name, values in found.items():
            assert [value for piece in pieces for value in piece[name]] == values


def test_an_answer_without_a_length_is_short(server: Running) -> None:
    reply = server.ask("/v1/completions", {"model": NAME, "prompt": "Once"})
    assert reply.body["usage"]["completion_tokens"] == 16


USER = {"role": "user", "content": "Tell me of Lily."}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def test_an_answer_is_that_of_the_templates_prompt(server: Running) -> None:
    reply = server.chat(temperature=0)
    prompt = ChatTemplate(server.tokenizer, PLAIN).prompt([USER])
    assert reply.status == 200
    (choice,) = reply.body["choices"]
    completion = server.complete(prompt=prompt, temperature=0).body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": completion["text"], "refusal": None}
    assert reply.body["object"] == "chat.completion"
    assert reply.body["usage"]["prompt_tokens"] == len(prompt)


@pytest.mark.parametrize("n", [1, 3])
def test_a_streamed_answer_says_the_same(server: Running, n: int) -> None:
    whole = server.chat(seed=2, n=n).body
    events = server.chat(seed=2, n=n, stream=True).events
    texts = [""] * n
    assert [event["choices"][0]["delta"] for event in events[:n]] == [{"role": "assistant", "content": ""}] * n
    for event in events:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        assert "usage" not in event
    assert texts == [choice["message"]["content"] for choice in whole["choices"]]
    assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_logprobs_of_an_answer(server: Running) -> None:
    (choice,) = server.chat(temperature=0, logprobs=True, top_logprobs=3).body["choices"]
    content = choice["logprobs"]["content"]
    said = b"".join(bytes(each["bytes"]) for each in content).decode()
    assert said.endswith(choice["message"]["content"])
    for each in content:
        assert len(each["top_logprobs"]) == 3
        assert each["top_logprobs"][0]["logprob"] == each["logprob"]
    streamed = server.chat(temperature=0, logprobs=True, stream=True).events
    found = [one for event in streamed for one in (event["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert [each["token"] for each in found] == [each["token"] for each in content]
    assert found[0]["top_logprobs"] == []


def test_parts_of_text_are_one_text(server: Running) -> None:
    parts = [{"type": "text", "text": "Tell me "}, {"type": "text", "text": "of Lily."}]
    reply = server.chat(messages=[{"role": "user", "content": parts}], temperature=0)
    assert reply.body["choices"] == server.chat(temperature=0).body["choices"]


def test_tools_reach_the_template(server: Running) -> None:
    template = ChatTemplate(server.tokenizer, PLAIN)
    for choice, tools in (("auto", [WEATHER]), ("none", None)):
        reply = server.chat(tools=[WEATHER], tool_choice=choice)
        assert reply.body["usage"]["prompt_tokens"] == len(template.prompt([USER], tools))


@pytest.mark.parametrize(("arguments", "status"), [('{"city": "Oslo"}', 200), ("", 200), ("{", 400), ("no", 400)])
def test_a_call_that_takes_nothing_may_have_empty_arguments(server: Running, arguments: str, status: int) -> None:
    def asked(arguments: str) -> list[dict[str, Any]]:
        called = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        calling = {"role": "assistant", "content": None, "tool_calls": [called], "refusal": None, "annotations": []}
        answered = {"role": "tool", "content": "rain", "tool_call_id": "a"}
        return [{"role": "developer", "content": "Be kind."}, USER, calling, answered]

    reply = server.chat(messages=asked(arguments), tools=[WEATHER], temperature=0)
    assert reply.status == status
    if not arguments:
        same = server.chat(messages=asked("{}"), tools=[WEATHER], temperature=0)
        assert reply.body["choices"] == same.body["choices"]


def test_what_the_template_refuses_is_the_clients_to_mend(server: Running) -> None:
    reply = server.chat(messages=[{"role": "user", "content": "mute"}])
    assert reply.status == 400
    assert "nothing is said" in reply.body["error"]["message"]
    assert reply.body["error"]["param"] == "messages"


@pytest.mark.contract
def test_an_answer_without_a_length_may_fill_the_context(server: Running) -> None:
    assert server.chat(max_tokens=None, temperature=0, stop=["."]).body["choices"][0]["finish_reason"] == "stop"
    messages = [{"role": "user", "content": "Tell me of Lily. " * 50}]
    long = server.chat(messages=messages, max_tokens=None, temperature=0, ignore_eos=True).body["usage"]
    assert long["total_tokens"] == server.served.engine.longest


def test_without_a_template_there_is_a_clear_word() -> None:
    with running(template=None) as server:
        reply = server.chat()
        assert reply.status == 400
        assert "--template FILE" in reply.body["error"]["message"]
        assert server.complete().status == 200


TEXTS = st.text("on ce,\n\u00eb\N{PARTY POPPER}END", max_size=8)


@pytest.mark.parametrize("kind", ["byte fallback", "byte level"])
def test_bytes_of_tokens_make_the_text(kind: str) -> None:
    tokenizer = tiny.tokenizer() if kind == "byte level" else AutoTokenizer.from_pretrained(checkpoint_folder())
    texts = TokenTexts(tokenizer, Grammars(tokenizer, len(tokenizer), frozenset()))
    for text in ("Once upon a time", "naïve 日本 🎉", "a\n b"):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert b"".join(map(texts.raw, ids)).decode().lstrip() == text
    assert texts.text(ids[0]) == texts.raw(ids[0]).decode()


LETTERS = st.text("ab", max_size=30)


@given(text=LETTERS, stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), cuts=st.data())
def test_what_is_let_through_is_before_the_first_stop(text: str, stops: list[str], cuts: st.DataObject) -> None:
    stop, given_out, at = StopStrings(stops), "", 0
    while at < len(text) and not stop.found:
        size = cuts.draw(st.integers(1, 3))
        given_out += stop.push(text[at : at + size])
        # Nothing that is sent can be part of a stop string.
        assert text.startswith(given_out)
        at += size
    given_out += stop.finish()
    # A string may be found only once its last letter came, and another one may have begun before it.
    places = [text[:at].find(each) for each in stops if each in text[:at]]
    assert given_out == (text[: min(places)] if places else text)


@given(data=st.data(), kind=st.sampled_from(sorted(KINDS)))
def test_an_answer_ends_with_the_token_that_finishes_a_stop_string(data: st.DataObject, kind: str) -> None:
    """Whatever its tokens are."""
    tokenizer = KINDS[kind]()
    ids = st.lists(st.integers(0, len(tokenizer) - 1), max_size=10)
    prompt = data.draw(ids | TEXTS.map(lambda text: tokenizer(text).input_ids))
    tokens = data.draw(ids | TEXTS.map(lambda text: tokenizer(text, add_special_tokens=False).input_ids))
    stops = data.draw(st.lists(st.text("on \n\u00eb\N{PARTY POPPER}EN", min_size=1, max_size=2), max_size=2))
    choice, pieces, at = Choice(tokenizer, prompt, stops), [], 0
    while at < len(tokens) and choice.finish_reason is None:
        part = tuple(tokens[at : at + data.draw(st.integers(1, 3))])
        scored = tuple(TokenLogprobs(token, -1.0, ()) for token in part)
        pieces.append(choice.take(Committed(part, scored, len(part), len(part))))
        at += len(part)
    if choice.finish_reason is None:
        pieces.append(choice.end(Finished("length", None, len(prompt), len(tokens), 0, 0)))
    wholes = [continuation(tokenizer, prompt, tokens[:count]) for count in range(len(tokens) + 1)]
    ended = [count for count, whole in enumerate(wholes) if any(stop in whole for stop in stops)]
    if ended:
        places = [wholes[ended[0]].find(stop) for stop in stops]
        assert choice.text == wholes[ended[0]][: min(place for place in places if place >= 0)]
        # What a round commits behind a stop string counts for nobody.
        assert (choice.counts, choice.finish_reason) == (Counts(ended[0], at, ended[0]), "stop")
    else:
        assert choice.text == wholes[-1]
        assert (choice.counts, choice.finish_reason) == (Counts(at, at, at), "length")
    assert "".join(piece.text for piece in pieces) == choice.text
    assert [each for piece in pieces for each in piece.scored] == choice.scored
    assert [each.token for each in choice.scored] == tokens[: choice.counts.tokens]


@pytest.mark.parametrize("stream", [False, True])
def test_a_predicted_answer_is_the_same(server: Running, stream: bool) -> None:
    plain = server.chat(max_tokens=60, temperature=0).body["choices"][0]["message"]["content"]
    edited = {"type": "content", "content": plain.replace(" the ", " a ", 1) + " The end."}
    asked: dict[str, Any] = {"prediction": edited, "max_tokens": 60, "temperature": 0, "stream": stream}
    reply = server.chat(**asked, **({"stream_options": {"include_usage": True}} if stream else {}))
    body = reply.events[-1] if stream else reply.body
    if stream:
        pieces = [event["choices"][0]["delta"].get("content", "") for event in reply.events[:-1]]
        assert "".join(pieces) == plain
    else:
        assert body["choices"][0]["message"]["content"] == plain
    details = body["usage"]["completion_tokens_details"]
    assert 30 < details["accepted_prediction_tokens"] <= details["accepted_draft_tokens"] <= 60
    assert details["rejected_prediction_tokens"] > 0
    refused = server.chat(prediction={"type": "content", "content": 5})
    assert (refused.status, refused.body["error"]["param"]) == (400, "prediction")
