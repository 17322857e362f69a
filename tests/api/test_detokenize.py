"""Incremental decoding against decoding all at once, for the kinds of decoder there are."""

from __future__ import annotations

from functools import lru_cache

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from freetoken.api.detokenize import MAX_HELD_TOKENS, Detokenizer
from freetoken.api.tokenizer import Tokenizer
from tests.api.tiny_model import byte_level_tokenizer

TEXTS = st.text(
    st.one_of(st.sampled_from("abc the 世界 é😀\n\t  👩‍👩‍👧"), st.characters(codec="utf-8")),
    max_size=40,
)


@lru_cache
def byte_level() -> Tokenizer:
    return Tokenizer(byte_level_tokenizer(), {})


@lru_cache
def byte_fallback() -> Tokenizer:
    """As Llama's and Mistral's: ▁ for blanks, byte tokens for what the vocabulary lacks."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz\n", "▁the", "▁a", "世"]
    merges = [("▁", "a")]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>")])
    return Tokenizer(backend, {})


@lru_cache
def word_piece() -> Tokenizer:
    pieces = ["[UNK]", "[SEP]", *"abcdefgh.,", *(f"##{char}" for char in "abcdefgh")]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = Backend(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return Tokenizer(backend, {})


def decode_in_pieces(detokenizer: Detokenizer, ids: list[int], size: int = 1) -> list[str]:
    pieces = [detokenizer.push(ids[start : start + size]) for start in range(0, len(ids), size)]
    return [*pieces, detokenizer.finish()]


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_byte_level_pieces_join_to_the_one_shot_text_of_any_ids(data: st.DataObject) -> None:
    tokenizer = byte_level()
    size = tokenizer.vocab_size
    ids = data.draw(st.lists(st.integers(0, size + 3), max_size=30))
    skip = data.draw(st.booleans())
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
    pieces = decode_in_pieces(detokenizer, ids, data.draw(st.integers(1, 4)))
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(TEXTS, st.integers(1, 3))
@settings(max_examples=200, deadline=None)
def test_no_piece_of_valid_text_holds_half_a_character(text: str, size: int) -> None:
    for tokenizer in (byte_level(), byte_fallback()):
        ids = tokenizer.encode(text, add_special_tokens=False)
        pieces = decode_in_pieces(tokenizer.detokenizer(), ids, size)
        whole = tokenizer.decode(ids)
        assert "".join(pieces) == whole
        if "\ufffd" not in text:
            assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.sampled_from(["ab", "cab", "d", ".", ",", "gg"]), max_size=12))
@settings(deadline=None)
def test_word_piece_keeps_its_blanks(words: list[str]) -> None:
    tokenizer = word_piece()
    ids = tokenizer.encode(" ".join(words), add_special_tokens=False)
    assert "".join(decode_in_pieces(tokenizer.detokenizer(), ids)) == tokenizer.decode(ids)


@given(st.lists(st.integers(0, 290), max_size=60))
@settings(max_examples=200, deadline=None)
def test_random_byte_fallback_ids_decode_without_error_and_without_long_silence(
    ids: list[int],
) -> None:
    detokenizer = byte_fallback().detokenizer()
    silent = 0
    for token_id in ids:
        if token_id in (1, 2):
            continue
        silent = 0 if detokenizer.push([token_id]) else silent + 1
        assert silent <= MAX_HELD_TOKENS + 2
    detokenizer.finish()


def test_half_a_character_at_the_end_becomes_a_replacement_character() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("👋", add_special_tokens=False)
    detokenizer = tokenizer.detokenizer()
    assert len(ids) > 1
    assert detokenizer.push(ids[:-1]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_a_long_invalid_run_reads_as_in_one_shot_and_ends_with_the_next_token() -> None:
    tokenizer = byte_fallback()
    first_byte = 3
    invalid = [first_byte + 0xFF] * 40
    character = [first_byte + byte for byte in "é".encode()]
    ids = [*invalid, *tokenizer.encode("a", add_special_tokens=False), *character]
    text = "".join(decode_in_pieces(tokenizer.detokenizer(), ids))
    assert text == tokenizer.decode(ids)
    assert text.endswith("é")


def test_a_continued_text_keeps_its_first_blank() -> None:
    tokenizer = byte_fallback()
    prompt = tokenizer.encode("a", add_special_tokens=False)
    answer = tokenizer.encode("the", add_special_tokens=False)
    assert "".join(decode_in_pieces(tokenizer.detokenizer(), answer)) == "the"
    continued = tokenizer.detokenizer(context_ids=prompt)
    assert "".join(decode_in_pieces(continued, answer)) == " the"


def test_special_tokens_are_skipped_or_shown() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("a<|im_end|>b<extra token>", add_special_tokens=False)
    assert "".join(decode_in_pieces(tokenizer.detokenizer(), ids)) == "ab<extra token>"
    shown = tokenizer.detokenizer(skip_special_tokens=False)
    assert "".join(decode_in_pieces(shown, ids)) == "a<|im_end|>b<extra token>"


def test_bytes_of_gives_the_bytes_that_a_token_stands_for() -> None:
    for tokenizer in (byte_level(), byte_fallback()):
        ids = tokenizer.encode("the é a", add_special_tokens=False)
        joined = b"".join(tokenizer.bytes_of(token_id) for token_id in ids)
        assert joined.decode().strip() == "the é a"
