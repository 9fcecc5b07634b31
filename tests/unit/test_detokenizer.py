"""Text that comes in tokens is the text that comes at once, and stop strings cut it the same."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from serving.detokenizer import Detokenizer, StopStrings, TextReader, text_offsets
from serving.engine import Generation, Step
from serving.errors import ReleaseError
from serving.openai_schemas import CompletionRequest
from serving.tokenizer import ReleaseTokenizer, load_tokenizer
from tests.serving_fixtures import EOS, byte_tokenizer


def wrapped(tokenizer: Tokenizer) -> ReleaseTokenizer:
    return ReleaseTokenizer(
        tokenizer=tokenizer,
        eos_token_ids=(),
        context_length=100,
        vocab_size=tokenizer.get_vocab_size(),
        max_token_chars=10,
        chat_template=None,
    )


BYTES = wrapped(byte_tokenizer())


def metaspace() -> ReleaseTokenizer:
    """Spaces in front of words, byte fallback: as Llama 2 has it."""
    vocab = {"<unk>": 0, "▁a": 1, "▁b": 2, "c": 3}
    vocab |= {f"<0x{byte:02X}>": 4 + byte for byte in range(256)} | {"▁▁": 260}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return wrapped(tokenizer)


METASPACE = metaspace()


def pieces(tokenizer: ReleaseTokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.add(token_id) for token_id in token_ids), detokenizer.flush()]


@example("\ufffd" * 5 + "é")  # so many tokens wait that the text is passed on inside of the é
@given(st.text(max_size=40))
def test_text_comes_back_character_by_character(text: str) -> None:
    found = pieces(BYTES, list(BYTES.encode(text)))
    assert "".join(found) == text
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in found)


@given(st.lists(st.integers(0, 256), max_size=20), st.lists(st.integers(0, 256), max_size=60))
def test_what_follows_a_prompt_is_said_as_it_is_said_at_once(
    prompt: list[int], token_ids: list[int]
) -> None:
    detokenizer = Detokenizer(BYTES, prompt)
    found = "".join([*map(detokenizer.add, token_ids), detokenizer.flush()])
    if not BYTES.decode(prompt).endswith("\ufffd"):
        assert found == BYTES.decode([*prompt, *token_ids])[len(BYTES.decode(prompt)) :]
    else:
        assert found == BYTES.decode(token_ids)


def test_the_first_token_after_a_prompt_keeps_its_space() -> None:
    detokenizer = Detokenizer(METASPACE, [1, 3])
    assert [detokenizer.add(token_id) for token_id in (2, 1)] == [" b", " a"]


@given(st.text("aé日😀 ", max_size=12), st.text(" aé日😀", min_size=1, max_size=12))
def test_bytes_after_a_prompt_of_bytes(prompt: str, text: str) -> None:
    """Byte fallback decodes adjacent bytes only as a whole, and bytes may be spaces."""
    before, token_ids = ([4 + byte for byte in each.encode()] for each in ("a" + prompt, text))
    detokenizer = Detokenizer(METASPACE, before)
    found = "".join([*map(detokenizer.add, token_ids), detokenizer.flush()])
    assert found == text


def test_a_token_of_sentencepiece_keeps_its_space() -> None:
    """Its decoder drops the space at the beginning of a text."""
    texts = [METASPACE.token_text(token_id) for token_id in (1, 3, 260, 4 + 0xC3, 4 + 0x0A)]
    assert texts == [" a", "c", "  ", "\ufffd", "\n"]
    assert BYTES.token_text(EOS) == "<eos>"


def test_special_tokens_are_shown_if_they_are_asked_for() -> None:
    detokenizer = Detokenizer(BYTES, skip_special_tokens=False)
    assert detokenizer.add(256) == "<eos>"
    assert Detokenizer(BYTES).add(256) == ""


def test_a_leading_space_is_kept_inside_a_text() -> None:
    assert pieces(METASPACE, [1, 2, 3, 1]) == ["a", " b", "c", " a", ""]
    euro = [4 + byte for byte in "€".encode()]
    assert pieces(METASPACE, [1, *euro, 2]) == ["a", "", "", "€", " b", ""]


@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    st.data(),
)
def test_stop_strings_cut_the_same_wherever_pieces_end(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    finder = StopStrings(stops)
    given_out = ""
    stopped: str | None = None
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        safe, stopped = finder.add(text[begin:end])
        given_out += safe
        if stopped:
            break
    else:
        given_out += finder.flush()
    # As if each character were a piece: the stop string that is complete first ends the text.
    complete = (
        (end, stop) for end in range(len(text) + 1) for stop in stops if text[:end].endswith(stop)
    )
    end, stop = next(complete, (len(text), None))
    assert stopped == stop
    assert given_out == text[: end - len(stop or "")]


@pytest.mark.parametrize(
    ("stops", "min_tokens", "ending"),
    [
        (["<END>"], 0, ("ab", "<END>")),
        (["<END>"], 5, ("ab", "<END>")),
        (["<END>"], 6, ("ab", "<END>")),
        # The stop string is complete with the seventh token. Like an end-of-sequence token, it ends
        # the text only after `min_tokens` other tokens.
        (["<END>"], 7, ("ab<END>c", None)),
        # The text that may become the longer stop string already contains the shorter one.
        (["b<", "ab<END>d", ">c"], 4, ("ab<END", ">c")),
        (["b<", "ab<END>d"], 4, ("ab<END>c", None)),
    ],
)
@pytest.mark.parametrize("step_size", [1, 3, 8])
def test_a_stop_string_ends_the_text_if_its_end_is_after_min_tokens(
    stops: list[str], min_tokens: int, ending: tuple[str, str | None], step_size: int
) -> None:
    token_ids = BYTES.encode("ab<END>c")
    request = CompletionRequest.model_validate({"prompt": "a", "stop": stops})
    generation = Generation(prompt=(0,), max_tokens=8, min_tokens=min_tokens)
    reader = TextReader(BYTES, generation, request)
    text = ""
    for start in range(0, 8, step_size):
        is_last = start + step_size >= 8
        step = Step(
            token_ids=token_ids[start : start + step_size],
            finish_reason="length" if is_last else None,
        )
        delta = reader.read(step)
        text += delta.text
        if delta.finish_reason is not None:
            break
    assert (text, delta.stop_reason) == ending


@pytest.mark.parametrize(
    ("body", "stop_reason"),
    [
        ({}, None),
        ({"stop_token_ids": [EOS]}, None),
        # Here only the request makes this token end the text.
        ({"stop_token_ids": [EOS], "ignore_eos": True}, EOS),
    ],
)
def test_the_end_of_sequence_is_a_stop_reason_if_it_ends_the_text_only_on_request(
    body: dict[str, Any], stop_reason: int | None
) -> None:
    tokenizer = replace(BYTES, eos_token_ids=(EOS,))
    request = CompletionRequest.model_validate({"prompt": "a", **body})
    generation = Generation(prompt=(0,), max_tokens=8, stop_token_ids=(EOS,))
    reader = TextReader(tokenizer, generation, request)
    assert reader.read(Step(token_ids=(EOS,), finish_reason="stop")).stop_reason == stop_reason


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match=r"tokenizer\.json: missing"):
        load_tokenizer(tmp_path)


@given(st.text(alphabet="ab c é世🙂", max_size=30), st.sampled_from(["bytes", "metaspace"]))
def test_offsets_are_those_of_tokens_that_come_one_by_one(text: str, kind: str) -> None:
    tokenizer = BYTES if kind == "bytes" else METASPACE
    token_ids = tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer)
    wanted, offset = [], 0
    for token_id in token_ids:
        wanted.append(offset)
        offset += len(detokenizer.add(token_id))
    assert list(text_offsets(tokenizer, token_ids)) == wanted
