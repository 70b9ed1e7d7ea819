"""Where the embedded engine is meant to differ from SGLang, and why. A test that meets a difference asks this table; docs/conformance.md shows it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DIFFERENCES", "Difference", "markdown"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """What each kind of engine does."""

    sglang: str
    embedded: str
    why: str


DIFFERENCES: dict[str, Difference] = {
    "a token id outside the vocabulary": Difference(
        sglang="ends the server", embedded="refused", why="our client never sends one; a server that others reach should outlive it"
    ),
    "an empty prompt in a batch": Difference(sglang="ends the server", embedded="refused", why="as above"),
    "a group without a name": Difference(sglang="ends the server", embedded="refused", why="as above"),
    "text and input_ids in one request": Difference(sglang="serves input_ids", embedded="refused", why="one of the two would be ignored in silence"),
    "an empty stop string": Difference(sglang="ends the completion at its first token", embedded="refused", why="nobody means that"),
    "top_p, top_k, min_p, penalties, n, grammars": Difference(
        sglang="served",
        embedded="refused unless neutral",
        why="training wants samples of the model's own distribution, whose log-probs the learner can repeat",
    ),
    "sampling_seed": Difference(
        sglang="ignored without deterministic inference", embedded="gives the same tokens again", why="runs that can be repeated; tests of the loop"
    ),
    "the last tokens of the context": Difference(
        sglang="kept free: 6 of prompts, 2 of completions, which are cut silently",
        embedded="usable",
        why="SGLang reserves them; nothing needs them here",
    ),
    "cached_tokens of a shared prefix": Difference(
        sglang="any shared prefix",
        embedded="whole finished sequences only",
        why="turns of one episode continue each other; a tree of prefixes would not gain them anything",
    ),
    "an update while not paused": Difference(
        sglang="waits for every request in flight, and holds new ones",
        embedded="comes in between two tokens",
        why="staged weights: generation need not stop",
    ),
    "when a bucket is live": Difference(
        sglang="as soon as it is received",
        embedded="all together, at end_weight_update",
        why="no token is made by half a version; a broken update leaves the old one whole",
    ),
    "a tensor of an unknown name": Difference(
        sglang="ignored in silence", embedded="refused before the broadcast", why="a misspelt name would leave a weight at its old version"
    ),
    "a tensor of a wrong shape": Difference(
        sglang="refused after the broadcast, with weights half updated",
        embedded="refused before the broadcast",
        why="the sizes of a broadcast are agreed upon first",
    ),
    "an update that names no version": Difference(
        sglang="changes the weights under the old name", embedded="refused at its end, nothing changed", why="versions say which weights made a token"
    ),
    "a flush while requests are frozen in place": Difference(
        sglang="answers 400 with the new weights live",
        embedded="answers 400 with the old weights kept",
        why="an answer of 400 means that nothing has happened",
    ),
    "flush_cache false in an update": Difference(
        sglang="prefixes of the old weights are used again",
        embedded="they are dropped all the same, unless paused in place",
        why="a token's log-prob must be that of its version",
    ),
    "an abort of a request that came during a pause": Difference(
        sglang="ignored: it runs to its end after the pause",
        embedded="ends it at once",
        why="SGLang holds it before its scheduler; nothing is gained by that",
    ),
    "a control call without a body": Difference(sglang="refused", embedded="the same as {}", why="no call needs one"),
    "a control call of the wrong form": Difference(
        sglang='400 {"object": "error", ...}',
        embedded='400 {"success": false, "message": ...}',
        why="one shape for every refusal of a control call; clients read both",
    ),
    "model_path of /model_info after an update from disk": Difference(
        sglang="the new directory", embedded="the directory it was started with", why="the version says what is served; the directory may be gone"
    ),
    "names in /weights_checker": Difference(
        sglang="fused parameters", embedded="Hugging Face names", why="what was sent can be compared tensor by tensor"
    ),
}


def markdown() -> str:
    """The table of docs/conformance.md."""
    rows = [f"| {name} | {each.sglang} | {each.embedded} | {each.why} |" for name, each in DIFFERENCES.items()]
    return "\n".join(["| | SGLang 0.5.23 | embedded engine | why |", "|---|---|---|---|", *rows])
