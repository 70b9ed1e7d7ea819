"""YAML 1.2 values with their places."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config.document import dump, merge, parse, path_text, plain
from agentrl.errors import ConfigError


def value(text: str) -> object:
    return plain(parse(text, label="x.yaml"))


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("1e-6", 1e-6), ("1E3", 1000.0), (".5", 0.5), ("1.", 1.0), ("-3", -3), ("+7", 7), ("017", 17), ("0o17", 15), ("0xff", 255),
        ("no", "no"), ("yes", "yes"), ("on", "on"), ("Off", "Off"), ("y", "y"), ("true", True), ("False", False), ("3:30", "3:30"),
        ("1_000", "1_000"), ("2026-01-01", "2026-01-01"), ("null", None), ("~", None), ("", None), ("'1'", "1"), ('"true"', "true"),
        ("<<", "<<"), ("=", "="), ("1e", "1e"), ("0b1", "0b1"), ("-.inf", -math.inf),
    ],
)  # fmt: skip
def test_scalars_mean_what_yaml_1_2_says(text: str, meant: object):
    got = value(text)
    assert got == meant
    assert type(got) is type(meant)


def test_nan_is_a_float():
    assert math.isnan(value(".nan"))


def test_every_value_and_key_knows_its_line_and_column():
    root = parse("a: 1\nb:\n  c: [x, {d: 2}]\n", label="f.yaml")
    c = root.value["b"].value["c"]
    assert (str(c.key), str(c.origin)) == ("f.yaml:3:3", "f.yaml:3:6")
    assert str(c.value[1].value["d"].origin) == "f.yaml:3:14"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: 1\na: 2", "f.yaml:2:1: duplicate key a (first at f.yaml:1:1)"),
        ("1: x", "f.yaml:1:1: a key must be a string, got '1' (put it in quotes)"),
        ("true: x", "f.yaml:1:1: a key must be a string, got 'true' (put it in quotes)"),
        ("a: !!python/name:os.system x", "f.yaml:1:4: tags are not supported: tag:yaml.org,2002:python/name:os.system"),
        ("a: !!set {x: null}", "f.yaml:1:4: tags are not supported: tag:yaml.org,2002:set"),
        ("a: &x [*x]", "f.yaml:1:4: this value contains itself"),
        ("a:\n\t- 1", "f.yaml:2:1: not valid YAML: found character '\\t' that cannot start any token"),
        ("a: 1\n---\nb: 2", "f.yaml:2:1: not valid YAML: but found another document"),
    ],
)
def test_what_is_refused_is_told_with_its_place(text: str, told: str):
    with pytest.raises(ConfigError) as caught:
        parse(text, label="f.yaml")
    assert str(caught.value) == told


def test_an_alias_repeats_its_anchor():
    assert value("a: &x {b: 1}\nc: *x") == {"a": {"b": 1}, "c": {"b": 1}}


def test_maps_merge_deep_and_lists_are_replaced():
    merged = merge(parse("a: {b: 1, c: [1, 2]}\nd: 5", label="base.yaml"), parse("a: {c: [3], e: null}\nd: {f: 1}", label="over.yaml"))
    assert plain(merged) == {"a": {"b": 1, "c": [3], "e": None}, "d": {"f": 1}}
    assert str(merged.value["a"].value["c"].origin) == "over.yaml:1:8"
    assert str(merged.value["a"].value["b"].origin) == "base.yaml:1:8"


def test_a_path_is_written_like_an_override():
    assert path_text(["tasks", "train", 0, "path"]) == "tasks.train[0].path"
    assert path_text([]) == ""


plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.sampled_from(["1e-6", "0o17", "no", "3:30"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.slow
@settings(max_examples=60)
@given(plain_values)
def test_what_is_dumped_is_read_back_the_same(written: object):
    assert value(dump(written)) == written
