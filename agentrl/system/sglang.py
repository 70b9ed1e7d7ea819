"""SGLang servers as engines of a run: how one is started from its own Python, what it is started with, and how it ends.

SGLang pins torch and transformers, so it lives in an environment of its own (`engine.python`) and nothing of it is imported here. One server is
one engine; with `engine.tensor_parallel` it is several processes. Flags and variables are those of SGLang 0.5.23.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

from agentrl.config.recipe import Recipe
from agentrl.engine_api import Abilities, EngineKeys
from agentrl.errors import ConfigError, EngineUnavailable
from agentrl.ports import free_port
from agentrl.system.address import LOOPBACK
from agentrl.system.guardian import guarded, let_go

__all__ = [
    "CONTEXT_MARGIN",
    "SGLangServer",
    "installed_version",
    "launch_command",
    "launch_environment",
    "require_abilities",
    "require_sglang",
    "write_keys",
]

# SGLang 0.5.23 takes prompts 6 tokens shorter than its context at most, and silently cuts completions that would end within 2 of it.
CONTEXT_MARGIN = 8
_ASK_EVERY_S = 0.5
_LAST_LINES = 20
_TESTED = "0.5.23"
_VERSION_DEADLINE_S = 20.0
# So much of the memory SGLang would book on a CPU is enough: weights and cache are sized by the flags below. Its default is nearly all of it.
_CPU_MEMORY_SHARE = 0.1
_REFUSED = re.compile(r".+?: error: (?:unrecognized arguments: (?P<unknown>.*)|.*)")  # argparse's last line, after a usage of hundreds
_FIND_VERSION = "import importlib.metadata; print(importlib.metadata.version('sglang'))"


def require_sglang(recipe: Recipe) -> None:
    """Look at what `engine.kind: sglang` needs before anything is started.

    Raises:
        ConfigError: naming the key and the remedy.
    """
    engine = recipe.engine
    EngineKeys.of_environment(engine.api_key_variable, engine.admin_key_variable)
    if engine.urls:
        return
    if engine.python is None:
        raise ConfigError(
            "engine.kind sglang needs engine.python, the Python of an environment that has sglang (it pins torch and transformers, so it has one"
            f' of its own): python3 -m venv sglang && sglang/bin/pip install "sglang=={_TESTED}", then engine.python=sglang/bin/python. Or attach to'
            " running servers: engine.urls"
        )
    require_abilities(installed_version(engine.python), recipe)


def require_abilities(version: str, recipe: Recipe) -> None:
    """Refuse a version that cannot do what the recipe needs.

    Raises:
        ConfigError: naming the version and the remedy.
    """
    if not Abilities.of(version).weight_spans and recipe.weights.pause != "abort":
        raise ConfigError(
            f"SGLang {version} does not say which weights wrote which token (0.5.20 and newer do): install a newer one, or set weights.pause=abort,"
            " which lets no reply have tokens of two versions"
        )


def installed_version(python: str) -> str:
    """The version of sglang in the environment of `python`, without importing it.

    Raises:
        ConfigError: there is no such Python, or it has no sglang.
    """
    try:
        found = subprocess.run([python, "-c", _FIND_VERSION], capture_output=True, text=True, timeout=_VERSION_DEADLINE_S, env=_plain_environment())
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"engine.python {python} cannot be run: {error}") from error
    if found.returncode != 0:
        raise ConfigError(f'engine.python {python} has no sglang: {python} -m pip install "sglang=={_TESTED}"')
    return found.stdout.strip()


def launch_command(recipe: Recipe, model_dir: Path, *, host: str, port: int, keys_file: Path | None = None) -> list[str]:
    """The command line of a server that serves `model_dir`.

    Args:
        keys_file: what `write_keys` has written.
    """
    engine = recipe.engine
    assert engine.python is not None
    flags: dict[str, object] = {
        "model_path": model_dir,
        "host": host,
        "port": port,
        "dtype": recipe.model.dtype,
        "context_length": engine.context_tokens + CONTEXT_MARGIN,
        "max_running_requests": engine.slots,
        "tp_size": engine.tensor_parallel,
        "random_seed": recipe.seed,
        "weight_version": "0",
        "log_level_http": "warning",  # a line per request otherwise
    }
    if engine.device == "cpu":
        cache = engine.slots * engine.context_tokens
        flags |= {"device": "cpu", "attention_backend": "torch_native", "mem_fraction_static": _CPU_MEMORY_SHARE, "max_total_tokens": cache}
    elif recipe.resources.colocate:  # the weights that wake up are those that fell asleep: kept in host memory meanwhile
        flags |= {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
    flags |= dict(engine.options) | {"config": keys_file}
    command = [engine.python, "-m", "sglang.launch_server"]
    for name, value in flags.items():
        if value is not None and value is not False:
            command += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return command


def write_keys(keys: EngineKeys, directory: Path) -> Path | None:
    """Keys as a configuration file of SGLang that its owner alone can read; None where there are none. A command line could be read by anybody."""
    told = {name: key for name, key in (("api-key", keys.api), ("admin-api-key", keys.admin)) if key is not None}
    if not told:
        return None
    descriptor, name = tempfile.mkstemp(prefix=".sglang-", suffix=".yaml", dir=directory)  # mode 0600
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(told, file)  # JSON is YAML
    return Path(name)


def launch_environment(recipe: Recipe) -> dict[str, str]:
    """The environment of a server: this process's without our import path, what a run needs of SGLang, and `engine.environment`."""
    engine = recipe.engine
    ours = {
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # for the margin: no token is at a position beyond engine.context_tokens
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # /health then answers at once, and while generation is paused
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }
    if engine.device == "cpu":
        ours |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": str(engine.threads)}
        if engine.tensor_parallel > 1:  # each process wants cores of its own, or SGLang asks for as many NUMA nodes
            per = engine.threads
            ours["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(_cores(rank * per, per) for rank in range(engine.tensor_parallel))
    return _plain_environment() | ours | engine.environment


@dataclass
class SGLangServer:
    """A running server, with the file its output goes to. `with` ends it and all of its processes."""

    url: str
    log: Path
    keys: EngineKeys
    guardian: subprocess.Popen[bytes]
    python: str
    keys_file: Path | None = None

    @classmethod
    def start(cls, recipe: Recipe, model_dir: Path, *, log: Path, host: str = LOOPBACK) -> SGLangServer:
        """Start a server on a free port; returns before it is ready."""
        port, keys = free_port(host), EngineKeys.of_environment(recipe.engine.api_key_variable, recipe.engine.admin_key_variable)
        log.parent.mkdir(parents=True, exist_ok=True)
        if log.exists():  # of the server before, whose end may have to be looked into
            log.replace(log.with_name(f"{log.name}.old"))
        keys_file = write_keys(keys, log.parent)
        launched = launch_command(recipe, model_dir, host=host, port=port, keys_file=keys_file)
        with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as output:  # SGLang logs its arguments, keys among them
            guardian = subprocess.Popen(
                guarded(launched),
                stdin=subprocess.PIPE,  # closes with this process: the server does not outlive it
                stdout=output,
                stderr=subprocess.STDOUT,
                env=launch_environment(recipe),
                start_new_session=True,
            )
        return cls(url=f"http://{host}:{port}", log=log, keys=keys, guardian=guardian, python=launched[0], keys_file=keys_file)

    def __enter__(self) -> SGLangServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.guardian.wait()
        self._forget_keys()

    def stop(self) -> None:
        """Ask it to end. Harmless where it has."""
        let_go(self.guardian)

    def wait_ready(self, deadline_s: float) -> None:
        """Wait until it answers requests.

        Raises:
            EngineUnavailable: it ended before, or the deadline passed; with the last lines of its output.
        """
        until = time.monotonic() + deadline_s
        with httpx.Client(trust_env=False) as http:
            while time.monotonic() < until:
                if (code := self.guardian.poll()) is not None:
                    raise EngineUnavailable(f"{self._refused()}the SGLang server ended with code {code} while it started. {self.last_lines()}")
                try:
                    if http.get(f"{self.url}/ready", headers=self.keys.headers("/ready"), timeout=_ASK_EVERY_S).status_code == httpx.codes.OK:
                        self._forget_keys()
                        return
                except httpx.TransportError:
                    pass  # it does not listen yet
                time.sleep(_ASK_EVERY_S)
        raise EngineUnavailable(f"the SGLang server was not ready within engine.start_deadline_s ({deadline_s:g} s). {self.last_lines()}")

    def wait(self) -> int:
        """Wait for its end. Returns its exit code."""
        return self.guardian.wait()

    def _forget_keys(self) -> None:
        """SGLang has read them, or never will."""
        if self.keys_file is not None:
            self.keys_file.unlink(missing_ok=True)

    def last_lines(self) -> str:
        """The end of its output, for error messages."""
        lines = self._output()
        lines = lines[-1:] if self._refusal() else lines[-_LAST_LINES:]
        return f"The last lines of {self.log}:\n" + "\n".join(f"    {line}" for line in lines)

    def _refusal(self) -> re.Match[str] | None:
        """The line that says why it does not take its command line; None where it did."""
        lines = self._output()
        return _REFUSED.fullmatch(lines[-1]) if any(line.startswith("usage: ") for line in lines) else None

    def _refused(self) -> str:
        """Which flags it does not know, if that is why it ended; only engine.options can have brought them."""
        refused = self._refusal()
        if refused is None or refused["unknown"] is None:
            return ""
        flags = ", ".join(word for word in refused["unknown"].split() if word.startswith("--"))
        return f"engine.options names what SGLang {installed_version(self.python)} does not know: {flags}; "

    def _output(self) -> list[str]:
        text = self.log.read_text(encoding="utf-8", errors="replace")
        for key in filter(None, (self.keys.api, self.keys.admin)):
            text = text.replace(key, "<key>")
        return text.splitlines()


def _plain_environment() -> dict[str, str]:
    """This process's environment without what is about its own Python."""
    return {name: value for name, value in os.environ.items() if not re.fullmatch(r"PYTHON(PATH|HOME)|VIRTUAL_ENV|OMP_NUM_THREADS", name)}


def _cores(first: int, count: int) -> str:
    return ",".join(str(core) for core in range(first, first + count))
