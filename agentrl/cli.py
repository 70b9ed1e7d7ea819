"""The command line. Everything heavy is imported inside the command that needs it: `agentrl --help` answers at once.

Exit codes: 0 done; 1 it failed, with one clear cause on stderr; 2 a recipe, an argument or a data file is wrong; 3 an alarm paused the run;
130 Ctrl-C.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from agentrl import __version__
from agentrl.errors import AgentRLError, ConfigError, DataError

__all__ = ["app", "data", "engine_serve", "evaluate", "export", "main", "retriever", "run", "selftest", "status", "validate", "version"]

app = typer.Typer(
    name="agentrl",
    help="Asynchronous off-policy reinforcement learning for language-model agents that use tools.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
engine_app = typer.Typer(help="The embedded engine alone.", no_args_is_help=True)
app.add_typer(engine_app, name="engine")

_PROGRESS_EVERY_S = 5.0

RecipeArguments = Annotated[
    list[str], typer.Argument(metavar="RECIPE... [a.b=c ...]", help="Recipe files, merged left to right, then overrides of single keys.")
]
Smoke = Annotated[bool, typer.Option("--smoke", help="The recipe made small: two steps on this machine, no network.")]


def main() -> None:
    """Run the command line and exit."""
    # Users' `module:Class` may live in the current directory; ours come first.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        app()
    except (ConfigError, DataError) as error:
        _fail(error, 2)
    except AgentRLError as error:
        _fail(error, 1)


@app.command()
def run(
    recipe: RecipeArguments,
    smoke: Smoke = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin anew: an existing run of this name is moved aside, not resumed.")] = False,
    address: Annotated[str | None, typer.Option("--address", help="Of a running Ray cluster: the same as run.ray_address=...")] = None,
) -> None:
    """Train. The same command again goes on where a stopped run ended."""
    loaded = _load([*recipe, *([] if address is None else [f"run.ray_address={address}"])], smoke=smoke)
    from agentrl.system.run import run as run_recipe

    raise typer.Exit(run_recipe(loaded, command=["agentrl", *sys.argv[1:]], smoke=smoke, fresh=fresh))


@app.command()
def validate(
    recipe: RecipeArguments,
    smoke: Smoke = False,
    full: Annotated[bool, typer.Option("--full", help="Print the whole resolved recipe as YAML instead.")] = False,
) -> None:
    """Check a recipe and say what a run of it would be, without running anything."""
    loaded = _load(recipe, smoke=smoke)
    from agentrl.config.essentials import essentials
    from agentrl.config.load import dump_recipe
    from agentrl.config.modes import require_mode

    require_mode(loaded)
    if full:
        typer.echo(dump_recipe(loaded), nl=False)
        return
    from agentrl.system.build import missing_code

    rows = [("recipe", f"{loaded.name}: valid"), *essentials(loaded), *(("missing", told) for told in missing_code(loaded))]
    for what, words in rows:
        typer.echo(f"{what:<12} {words}")


@app.command()
def status(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's directory, or its name under ./runs.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say where a run stands: step, ledger, processes."""
    directory = next((path for path in (Path(run), Path("runs") / run) if path.is_dir()), None)
    if directory is None:
        raise ConfigError(f"no such run: neither {run} nor runs/{run} is a directory")
    from agentrl.config.document import dump
    from agentrl.system.status import status as status_of

    told: dict[str, Any] = status_of(directory)
    typer.echo(json.dumps(told, indent=2) if as_json else dump(told), nl=as_json)


@app.command()
def evaluate(
    recipe: RecipeArguments,
    checkpoint: Annotated[Path, typer.Option("--checkpoint", help="A checkpoint's directory, or an exported model's.")],
    smoke: Smoke = False,
) -> None:
    """Evaluate a checkpoint on the recipe's evaluation sets."""
    loaded = _load(recipe, smoke=smoke)
    _require_directory(checkpoint, "--checkpoint")
    from agentrl.evaluate import evaluate as evaluate_recipe

    raise typer.Exit(evaluate_recipe(loaded, checkpoint=checkpoint.resolve()))


@app.command()
def selftest(recipe: RecipeArguments, smoke: Smoke = False) -> None:
    """Check that learner, engines, tokenizer and chat template agree: a few steps at learning rate 0, a line per check."""
    loaded = _load(recipe, smoke=smoke)
    from agentrl.system.selftest import selftest as test_recipe

    raise typer.Exit(test_recipe(loaded, command=["agentrl", *sys.argv[1:]], smoke=smoke))


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint's directory, runs/NAME/checkpoints/...")],
    out: Annotated[Path, typer.Option("--out", help="Directory to write.")],
) -> None:
    """Write a checkpoint as a Hugging Face directory."""
    _require_directory(checkpoint, "CHECKPOINT", holds="manifest.json")
    from agentrl.learner.export import export_checkpoint

    export_checkpoint(checkpoint.resolve(), out.resolve())
    typer.echo(f"wrote {out}")


@app.command()
def data(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="nq hotpotqa triviaqa popqa 2wiki musique bamboogle wiki18 wiki18-e5")],
    out: Annotated[Path, typer.Option("--out", help="Directory to write below.")] = Path("data"),
    split: Annotated[list[str] | None, typer.Option("--split", help="By default those that Search-R1 uses. May be given several times.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only this many rows from the start of each file.")] = None,
    source: Annotated[Path | None, typer.Option("--from", help="A file, or a directory laid out as the repository, instead of the hub.")] = None,
    revision: Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit on the hub; by default main.")] = None,
) -> None:
    """Prepare public data: Search-R1's questions, and the passages and index it searches."""
    from agentrl.data.preparation import prepare
    from agentrl.data.public_sets import public_set

    for public in [public_set(name) for name in names]:
        for made in prepare(public, out=out, splits=split or (), limit=limit, source=source, revision=revision, progress=_progress_line()):
            typer.echo("\n".join(made.told()))
        typer.echo(f"  licence: {public.licence}\n  cite: {public.cite}")


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def retriever(context: typer.Context) -> None:
    """Build an index of a corpus, or serve one (`agentrl retriever --help`)."""
    from retriever.__main__ import main as retriever_main

    raise typer.Exit(retriever_main(list(context.args)))


@engine_app.command("serve")
def engine_serve(
    model_dir: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="A Hugging Face directory.")],
    host: Annotated[str, typer.Option("--host")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one and says which.")] = 30000,
    slots: Annotated[int, typer.Option("--slots", min=1, help="Sequences generated at a time.")] = 64,
    context_tokens: Annotated[
        int | None, typer.Option("--context-tokens", min=1, help="Longest sequence; by default 4096, or the model's positions where they are fewer.")
    ] = None,
    threads: Annotated[int, typer.Option("--threads", min=1)] = 1,
    device: Annotated[Literal["cpu", "cuda"], typer.Option("--device")] = "cpu",
    api_key: Annotated[str | None, typer.Option("--api-key-variable", metavar="NAME", help="Environment variable with the key of callers.")] = None,
    admin_key: Annotated[str | None, typer.Option("--admin-key-variable", metavar="NAME", help="... with the key of control calls.")] = None,
) -> None:
    """Serve a model with SGLang's native HTTP API."""
    _require_directory(model_dir, "MODEL_DIR", holds="config.json")
    from agentrl.system.engine_server import serve, server_keys

    keys = server_keys(host, api_key_variable=api_key, admin_key_variable=admin_key)
    serve(model_dir.resolve(), host=host, port=port, slots=slots, context_tokens=context_tokens, threads=threads, device=device, keys=keys)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def _load(arguments: list[str], *, smoke: bool) -> Any:
    """The recipe of a command's arguments: files, then overrides."""
    from agentrl.config.load import load_recipe
    from agentrl.config.override import is_override

    files = [argument for argument in arguments if Path(argument).exists() or not is_override(argument)]
    return load_recipe([Path(file) for file in files], [argument for argument in arguments if argument not in files], smoke=smoke)


def _progress_line() -> Callable[[str, int, int | None], None]:
    """Tells how far a file is, every few seconds and at its end."""
    told_at = time.monotonic()

    def tell(file: str, done: int, of: int | None) -> None:
        nonlocal told_at
        if done == of or time.monotonic() - told_at > _PROGRESS_EVERY_S:
            told_at = time.monotonic()
            typer.echo(f"{file}: {done:,}{f' of {of:,}' if of else ''}", err=True)

    return tell


def _require_directory(path: Path, name: str, *, holds: str | None = None) -> None:
    if not path.is_dir():
        raise ConfigError(f"{name}: no such directory: {path}")
    if holds is not None and not (path / holds).is_file():
        what = {"manifest.json": "a checkpoint, runs/NAME/checkpoints/...", "config.json": "a Hugging Face directory"}[holds]
        raise ConfigError(f"{name}: {path} is not {what}: it has no {holds}")


def _fail(error: AgentRLError, code: int) -> None:
    """Say what went wrong and exit. Nothing of the traceback: an AgentRLError says all there is to say."""
    typer.echo(str(error), err=True)
    sys.exit(code)
