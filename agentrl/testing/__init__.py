"""Fakes for tests, yours and this project's. No production module imports them.

from agentrl.testing import play, saying

def test_the_answer_is_scored():
    trajectory = play(MyEnvironment(), policy=saying("<answer> 42 </answer>"), task=Task(id="1", prompt="6 x 7?", answers=("42",)))
    assert trajectory.reward.total == 1.0
"""

from agentrl.testing.buffer import FakeBuffer
from agentrl.testing.engine import FakeEngine, turns
from agentrl.testing.play import play
from agentrl.testing.policy import ScriptedPolicy, saying
from agentrl.testing.tokenizer import byte_encoder, byte_tokenizer, word_encoder, word_tokenizer, write_tokenizer

__all__ = [
    "FakeBuffer",
    "FakeEngine",
    "ScriptedPolicy",
    "byte_encoder",
    "byte_tokenizer",
    "play",
    "saying",
    "turns",
    "word_encoder",
    "word_tokenizer",
    "write_tokenizer",
]
