import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.config.recipe import WarmStartRecipe
from agentrl.errors import DataError
from agentrl.learner.warm_start import warm_start


def write_rows(path, rows):
    path.write_text("\n".join(json.dumps({"segments": [{"text": text, "loss": loss} for text, loss in row]}) for row in rows))
    return path


def settings(**overrides):
    return WarmStartRecipe(**({"rows": "none", "steps": 20, "tokens_per_step": 64, "pool": 8, "warmup_steps": 2, "threads": 1} | overrides))


ROWS = [[(f"<bos> w{number} w{number + 1}", False), (f"w{number} w{number + 1}", True)] for number in range(3, 23)]


@pytest.mark.slow
def test_it_learns_the_marked_spans_and_writes_a_model_that_loads(model_dir, tmp_path):
    told = []
    rows = write_rows(tmp_path / "rows.jsonl", ROWS)
    out = warm_start(model_dir, rows, settings(), tmp_path / "out", 0, lambda *progress: told.append(progress))
    assert (told[-1][:2], len(told)) == ((20, 20), 20)
    assert told[-1][2] < told[0][2] - 1.0
    assert AutoTokenizer.from_pretrained(out)("w7")["input_ids"] == [7]
    assert AutoModelForCausalLM.from_pretrained(out).config.vocab_size == 48


@pytest.mark.slow
def test_a_seed_gives_the_same_weights(model_dir, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", ROWS)
    outs = [warm_start(model_dir, rows, settings(steps=3), tmp_path / str(run), 1, lambda *_: None) for run in range(2)]
    one, other = (AutoModelForCausalLM.from_pretrained(out).state_dict() for out in outs)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"segments": [{"text": "w3"}]}', r"rows.jsonl:1: expected"),
        ("not json", r"rows.jsonl:1: expected"),
        ('{"segments": [{"text": "w3", "loss": 1}]}', r"rows.jsonl:1: a segment's text is a string and its loss true or false"),
        ('{"segments": [{"text": "w3", "loss": true}]}', r"rows.jsonl:1: no token with loss after the first"),
        (json.dumps({"segments": [{"text": "w3 " * 65, "loss": True}]}), r"rows.jsonl:1: 65 tokens; the model has 64 positions"),
        ("", r"rows.jsonl: no rows"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(model_dir, tmp_path, line, message):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(line)
    with pytest.raises(DataError, match=message):
        warm_start(model_dir, rows, settings(), tmp_path / "out", 0, lambda *_: None)
