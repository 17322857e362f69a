from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.make_moe import MoeShape, make_checkpoint
from tools.record_routing import main
from tools.routing_traces import load_recording


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_every_token_of_prompt_and_answer_is_recorded(tmp_path: Path, family: str) -> None:
    model = make_checkpoint(
        tmp_path / "model", MoeShape(family=family, experts=6, top_k=3, dtype="float32")
    )
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps([{"chat": "one"}, {"other": ""}, {"chat": "two"}, {"chat": ""}]))
    output = tmp_path / "routing.npz"
    arguments = ["--model", str(model), "--prompts", str(prompts), "--new-tokens", "4"]
    assert main([str(output), *arguments, "--num-prompts", "2"]) == 0
    recording = load_recording(output)
    assert recording.num_experts == 6
    assert len(recording.conversations) == 2
    for ids in recording.conversations:
        assert ids.shape[1:] == (2, 3)
        assert len(ids) > len("<|im_start|>user\n")
        assert all(len(set(layer)) == 3 for token in ids.tolist() for layer in token)
        assert ids.max() < 6


def test_directory_without_a_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "out.npz"), "--model", str(tmp_path)]) == 1
    assert "record_routing: error: " in capsys.readouterr().err
