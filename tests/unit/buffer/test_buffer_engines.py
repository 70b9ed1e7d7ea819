"""The roster of engines: who lives, who has the newest weights, and what is said of those that are gone."""

from pathlib import Path

import pytest
from buffer_play import open_buffer

from agentrl.buffer.engines import Engines
from agentrl.buffer_api import EngineEntry, EngineRoster
from agentrl.errors import StaleIncarnation


def entries(engines):
    return [(entry.index, entry.incarnation, entry.version, entry.current) for entry in engines.roster.engines]


def test_an_engine_begins_fenced_becomes_current_and_is_fenced_again_with_a_reason():
    engines = Engines()
    engines.live(1, 7, "http://one")
    engines.live(0, 6, "http://zero")
    assert entries(engines) == [(0, 6, None, False), (1, 7, None, False)]
    assert engines.current(1, 7, 12)
    assert entries(engines) == [(0, 6, None, False), (1, 7, 12, True)]
    assert engines.fenced(1, 7, "late", give_up=True)
    assert engines.roster.engines[1] == EngineEntry(index=1, incarnation=7, url="http://one", reason="late", given_up=True)
    assert engines.current(1, 7, 13)
    assert engines.roster.engines[1] == EngineEntry(index=1, incarnation=7, url="http://one", version=13, current=True)


def test_every_change_has_a_revision_and_saying_the_same_again_has_none():
    engines = Engines()
    assert engines.roster.revision == 0
    engines.live(0, 1, "http://zero")
    engines.current(0, 1, 3)
    assert engines.roster.revision == 2
    engines.current(0, 1, 3)
    engines.live(0, 1, "http://zero")
    assert engines.roster.revision == 2
    assert engines.dead(0, 1)
    assert not engines.dead(0, 1)
    assert engines.roster == EngineRoster(revision=3, engines=())


def test_what_is_said_of_a_dead_incarnation_changes_nothing_of_the_living_one():
    engines = Engines()
    engines.live(0, 1, "http://old")
    engines.live(0, 2, "http://new")
    revision = engines.roster.revision
    assert not engines.dead(0, 1)
    assert not engines.current(0, 1, 9)
    assert not engines.fenced(0, 1, "late", give_up=False)
    engines.live(0, 1, "http://old")
    assert (engines.roster.revision, entries(engines)) == (revision, [(0, 2, None, False)])


def test_registering_an_engine_without_a_url_takes_the_old_one_off_and_with_one_puts_it_on(tmp_path: Path):
    buffer = open_buffer(tmp_path)
    buffer.register(role="engine", index=0, incarnation=5)
    assert entries(buffer.engines) == []
    buffer.register(role="engine", index=0, incarnation=5, url="http://zero")
    assert entries(buffer.engines) == [(0, 5, None, False)]
    buffer.engines.current(0, 5, 1)
    buffer.register(role="engine", index=0, incarnation=8)
    assert entries(buffer.engines) == []
    with pytest.raises(StaleIncarnation):
        buffer.register(role="engine", index=0, incarnation=5, url="http://zero")
    assert entries(buffer.engines) == []


def test_the_roster_travels_as_plain_values():
    engine = EngineEntry(index=1, incarnation=3, url="http://one", version=4, current=True)
    roster = EngineRoster(revision=9, engines=(engine,))
    assert EngineRoster.from_plain(roster.to_plain()) == roster
