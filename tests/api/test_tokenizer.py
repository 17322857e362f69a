"""Checkpoint files as they come, good and bad."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from freetoken.api.errors_http import ApiError
from freetoken.api.served import load_served
from freetoken.api.tokenizer import Tokenizer, load_chat_template
from freetoken.errors import ConfigError
from tests.api.tiny_model import write_model

USER = [{"role": "user", "content": "Hello"}]


def edit_json(path: Path, **changes: object) -> None:
    value = json.loads(path.read_text())
    value.update(changes)
    path.write_text(json.dumps(value))


def test_encoding_adds_the_models_own_special_tokens_only_on_request(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    backend = Backend.from_file(str(model / "tokenizer.json"))
    backend.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    backend.enable_truncation(4)
    backend.enable_padding(length=50)
    backend.save(str(model / "tokenizer.json"))
    tokenizer = Tokenizer.load(model)
    text = "the quick brown fox"
    plain = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.encode(text, add_special_tokens=True) == [0, *plain]
    assert tokenizer.decode(plain) == text


def test_tokens_that_only_the_configuration_names_are_added(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    size = Tokenizer.load(model).vocab_size
    added = {"content": "<|tool|>", "special": True, "normalized": False}
    path = model / "tokenizer_config.json"
    edit_json(path, added_tokens_decoder={str(size): added}, pad_token={"content": "<|pad|>"})
    tokenizer = Tokenizer.load(model)
    assert tokenizer.id_of("<|tool|>") == size
    assert tokenizer.encode("<|tool|>", add_special_tokens=False) == [size]
    assert tokenizer.decode([size]) == ""
    assert tokenizer.id_of("<|pad|>") == size + 1
    assert tokenizer.special_tokens["pad_token"] == "<|pad|>"


def test_prompts_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    model = write_model(tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(model)
    tokenizer = Tokenizer.load(model)
    template = load_chat_template(model, tokenizer.special_tokens)
    assert template is not None
    messages = [{"role": "system", "content": "Be <|im_end|>brief."}, {**USER[0], "name": "é 👋"}]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    text = template.render(messages, {})
    assert tokenizer.encode(text, add_special_tokens=False) == expected
    assert tokenizer.encode("a  b", add_special_tokens=True) == theirs("a  b")["input_ids"]


def test_ids_that_contradict_tokenizer_json_are_an_error(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    added = {"content": "<|tool|>", "special": True}
    edit_json(model / "tokenizer_config.json", added_tokens_decoder={"99999": added})
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json.*99999"):
        Tokenizer.load(model)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{not json"),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", None),
        ("tokenizer_config.json", "[1]"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": 1}}'),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}'),
        ("tokenizer_config.json", '{"chat_template": 7}'),
        ("chat_template.jinja", "{{ broken"),
        ("generation_config.json", "\udcff"),
        ("generation_config.json", '{"temperature": "hot"}'),
        ("generation_config.json", '{"top_p": 7}'),
        ("config.json", "no"),
    ],
)
def test_a_broken_file_is_a_config_error_with_its_name(
    tmp_path: Path, name: str, content: str | None
) -> None:
    model = write_model(tmp_path)
    if content is None:
        (model / name).unlink()
    else:
        (model / name).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        load_served(model, ())


def test_a_directory_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        load_served(tmp_path / "nowhere", ())


def test_the_chat_template_file_beats_the_configuration(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    (model / "chat_template.jinja").write_text("{{ bos_token }}from the file")
    template = load_chat_template(model, {"bos_token": "<s>"})
    assert template is not None
    assert template.render(USER, {}) == "<s>from the file"


def test_of_several_named_templates_the_default_is_used(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    named = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "{% generation %}plain{% endgeneration %}"},
    ]
    edit_json(model / "tokenizer_config.json", chat_template=named)
    template = load_chat_template(model, {})
    assert template is not None
    assert template.render(USER, {}) == "plain"


def test_templates_have_what_transformers_gives_them(tmp_path: Path) -> None:
    source = (
        "{%- for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{{ m | tojson }}{% endfor %}{{ strftime_now('%Y') | length }}{{ mood }}"
    )
    model = write_model(tmp_path, template=source)
    template = load_chat_template(model, {})
    assert template is not None
    rendered = template.render([{"role": "user", "content": "é<"}, USER[0]], {"mood": "!"})
    assert rendered == '{"role": "user", "content": "é<"}4!'


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[5].content + 1 }}", "element 5"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ ''.__class__.__mro__ }}", "unsafe|undefined|access"),
    ],
)
def test_a_template_that_fails_is_a_400_with_its_reason(
    tmp_path: Path, source: str, reason: str
) -> None:
    template = load_chat_template(write_model(tmp_path, template=source), {})
    assert template is not None
    with pytest.raises(ApiError, match=reason) as caught:
        template.render(USER, {})
    assert caught.value.status == 400
    assert caught.value.param == "messages"


def test_generation_config_gives_the_defaults_and_all_ends(tmp_path: Path) -> None:
    generation = {
        "temperature": 0.2,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "eos_token_id": 0,
    }
    served = load_served(write_model(tmp_path / "my-model", generation=generation), ())
    assert served.names == ("my-model",)
    assert served.defaults.temperature == 0.2
    assert served.defaults.top_p == 0.9
    assert served.defaults.top_k == 20
    assert served.defaults.min_p == 0.05
    assert served.defaults.repetition_penalty == 1.1
    assert served.eos_ids == (0, 2)


def test_a_model_in_the_hubs_cache_is_called_as_on_the_hub(tmp_path: Path) -> None:
    model = write_model(tmp_path / "models--org--name" / "snapshots" / "0123abcd")
    assert load_served(model, ()).names == ("org/name",)
    assert load_served(model, ("mine", "other")).names == ("mine", "other")


def test_the_models_vocabulary_may_be_larger_than_the_tokenizers(tmp_path: Path) -> None:
    served = load_served(write_model(tmp_path, vocab_size=4096, template=None), ())
    assert served.vocab_size == 4096
    assert served.template is None
