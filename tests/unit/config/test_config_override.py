"""Overrides of single keys."""

from __future__ import annotations

import pytest

from agentrl.config.document import parse, plain
from agentrl.config.override import Override, is_override, override
from agentrl.errors import ConfigError

DOCUMENT = "a: {b: 1, c: {d: 2}}\nt: {train: [{path: x}, {path: y}]}\nn: null\ns: text\n"


def after(*texts: str) -> object:
    document, refused = override(parse(DOCUMENT, label="f.yaml"), [Override.of(text) for text in texts])
    assert refused == []
    return plain(document)


@pytest.mark.parametrize(
    ("text", "path", "meant"),
    [
        ("a.b=1e-3", ("a", "b"), 1e-3),
        ("a.b=[1, 2]", ("a", "b"), [1, 2]),
        ('a.b=["x", {"y": null}]', ("a", "b"), ["x", {"y": None}]),
        ("a.b=", ("a", "b"), None),
        ("a.b=c=d", ("a", "b"), "c=d"),
        ("a.b='5'", ("a", "b"), "5"),
        ("t[0].path=z", ("t", 0, "path"), "z"),
        ("eval.sets.held-out.n=2", ("eval", "sets", "held-out", "n"), 2),
    ],
)
def test_an_override_is_a_path_and_a_yaml_value(text: str, path: tuple[str | int, ...], meant: object):
    item = Override.of(text)
    assert item.path == path
    assert plain(item.node) == meant


def test_scalars_and_lists_replace_and_maps_merge():
    assert after("a.b=2", "a.c={e: 3}", "t.train=[]") == {"a": {"b": 2, "c": {"d": 2, "e": 3}}, "t": {"train": []}, "n": None, "s": "text"}


def test_an_item_of_a_list_is_reached_by_its_index():
    assert after("t.train[1].path=z")["t"] == {"train": [{"path": "x"}, {"path": "z"}]}


def test_sections_on_the_way_are_made():
    assert after("x.y.z=1")["x"] == {"y": {"z": 1}}
    assert after("n.m=1")["n"] == {"m": 1}


def test_later_overrides_win():
    assert after("a.b=2", "a.b=3")["a"]["b"] == 3


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("t.train[2].path=z", "override 't.train[2].path=z': t.train has 2 item(s), so there is no [2]"),
        ("a[0]=z", "override 'a[0]=z': a is not a list"),
        ("s.x=1", "override 's.x=1': s is not a section, it has no key x"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused(text: str, told: str):
    _, refused = override(parse(DOCUMENT, label="f.yaml"), [Override.of(text)])
    assert [str(error) for error in refused] == [told]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a", "override 'a': an override is written key.key=value"),
        ("a..b=1", "override 'a..b=1': not a path to a key: 'a..b' (written like tasks.train[0].path)"),
        ("a.b=[1", "override 'a.b=[1': not valid YAML: expected ',' or ']', but got '<stream end>'"),
        ("a={b: 1, b: 2}", "override 'a={b: 1, b: 2}': duplicate key b (first at override 'a={b: 1, b: 2}')"),
    ],
)
def test_what_is_no_override_is_refused(text: str, told: str):
    with pytest.raises(ConfigError) as caught:
        Override.of(text)
    assert str(caught.value) == told


def test_overrides_are_told_from_files():
    assert is_override("a.b[0].c=1")
    assert not is_override("recipes/mine.yaml")
    assert not is_override("./odd=name.yaml")
