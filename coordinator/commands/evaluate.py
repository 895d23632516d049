"""`rolemesh evaluate`: scores of policies, of checkpoints, folders or a URL."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter, ValidationError
from rich.console import Console

from rolemesh.coordinator.commands.policies.live import live_url, tokenizer_of
from rolemesh.coordinator.commands.policies.policy import Policy, find_policy
from rolemesh.coordinator.commands.policies.scoring import (
    as_numbers,
    key_of,
    plain,
    rows_beside,
    scored,
)
from rolemesh.coordinator.commands.policies.serving import (
    KEY_VARIABLE,
    ServingError,
    check_can_serve,
    served,
    wished,
)
from rolemesh.coordinator.commands.policies.table import show_differences, show_evaluation
from rolemesh.coordinator.commands.policies.tasks import HELD_OUT, run_recipe, tasks_of
from rolemesh.coordinator.commands.terminal.console import JsonConsole
from rolemesh.coordinator.commands.terminal.ending import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_NOT_WHOLE,
    fail,
)
from rolemesh.coordinator.commands.terminal.options import Json
from rolemesh.coordinator.commands.terminal.processes import PreviewError
from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run.folders.evaluations import (
    FOLDER,
    ROWS_SUFFIX,
    EvaluationFile,
    compare_tasks,
    new_path,
    read_evaluation,
    write_evaluation,
)
from rolemesh.coordinator.run.folders.folder import is_run, read_status, run_of_id
from rolemesh.engine.messages import on_one_line
from rolemesh.engine.specs.evaluation import AskedSpec, DrawingSpec, EvaluationQuestion
from rolemesh.engine.specs.urls import check_token_is_safe, check_url, masked_url
from rolemesh.engine.specs.variables import TokenVariable

app = typer.Typer(add_completion=False)

_VARIABLE: TypeAdapter[str] = TypeAdapter(TokenVariable)


@app.command()
def evaluate(
    policies: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[POLICY]...",
            help="Folders or ids of runs, folders of checkpoints, model folders, hf:ORG/NAME; or "
            "files of earlier evaluations, which are compared.",
        ),
    ] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--tasks",
            metavar="TASK",
            help="held_out for a run's own held-out rows and reward; a reasoning-gym task as NAME, "
            "NAME:SIZE or NAME:SIZE:SEED; or a suite in YAML. With commas, or repeated.",
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Ask this OpenAI endpoint, e.g. that of a run which goes on: http://host:port/v1. "
            "A run that is named as well gets the results.",
        ),
    ] = None,
    live: Annotated[
        bool,
        typer.Option("--live", help="Ask the run as it goes on, at the endpoint that it tells of."),
    ] = False,
    key_variable: Annotated[
        str | None, typer.Option(metavar="NAME", help="Variable with the key of --url or --live.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Name of the model there; the first that it lists.")
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Of the policy at --url: prompts go there as a run renders them, as token ids. "
            "Without, messages go there. With --live that of the run's recipe.",
        ),
    ] = None,
    size: Annotated[
        int | None, typer.Option(min=1, help="Prompts of tasks that do not say; 100.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Completions a prompt.")] = 1,
    pass_at: Annotated[
        str | None, typer.Option(metavar="K,K", help="Also the chance that one of k passes.")
    ] = None,
    pass_score: Annotated[
        float | None,
        typer.Option(help="Score from which a completion passes; that of a fully right one."),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0, help="0 is greedy. Else 0 for one sample, and as in training for more."
        ),
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="Of the drawing; as in training.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest completion; that of the run, or 512.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the drawing.")] = 0,
    answer_tag: Annotated[
        str | None,
        typer.Option(metavar="TAG", help="The last <TAG>...</TAG> is the answer; all of it is."),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 32,
    step: Annotated[int | None, typer.Option(help="Step of the checkpoint; the newest.")] = None,
    best: Annotated[bool, typer.Option("--best", help="The run's best checkpoint.")] = False,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="A.B=C", help="A field of rollout or endpoint; may be repeated."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json", help="For the result; RUN/evaluations/..., or evaluations/..."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Scores policies on held-out rows and reasoning-gym tasks, with standard errors.

    Each policy is served meanwhile, and each completion has a seed of its own. With several
    policies their differences are shown, with errors over the same prompts. Exit code 0: all is
    scored; 1: it failed; 2: bad input; 3: some completions have no score, which are named.

    Example: rolemesh evaluate runs/mine --tasks held_out,chain_sum:200 --samples 8 --pass-at 1,8
    """
    given = policies or []
    try:
        if given and url is None and not live and all(_is_result(word) for word in given):
            found = [read_evaluation(Path(word)) for word in given]
        else:
            ks = () if pass_at is None else as_numbers(pass_at)
            _check(given, url, ks, samples, out, is_live=live)
            wish = _Wish(
                tasks=tasks or (),
                size=size,
                answer_tag=answer_tag,
                drawing={
                    **{"samples": samples, "seed": seed, "temperature": temperature},
                    **{"top_p": top_p, "max_tokens": max_tokens},
                },
                ks=ks,
                pass_score=pass_score,
                concurrency=concurrency,
                overrides=overrides or [],
                out=out,
                as_json=as_json,
            )
            if live:
                run = _run_of(given[0])
                url, tokenizer = live_url(run), tokenizer or tokenizer_of(run_recipe(run))
                wish.tell(f"{run} answers at {url}")
            if url is not None:
                asked = _asked(url, key_variable, model, tokenizer, concurrency)
                found = [_of_url(asked, given, wish)]
            else:
                known = [find_policy(word, step=step, best=best) for word in given]
                found = [_of_policy(one, wish) for one in known]
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except (ServingError, PreviewError, OSError) as error:
        fail(str(error), EXIT_FAILED, as_json=as_json)
    except ValueError as error:
        fail(str(error), EXIT_BAD_INPUT, as_json=as_json)
    _show_differences(found, as_json=as_json)
    every = [task for one in found for task in one.tasks.values()]
    if any(task.score() is None for task in every):
        fail("a task has no score at all", EXIT_FAILED, as_json=as_json)
    if any(task.unscored for task in every):
        raise typer.Exit(EXIT_NOT_WHOLE)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wish:
    """What the command line says of every policy."""

    tasks: Sequence[str]
    size: int | None
    answer_tag: str | None
    drawing: Mapping[str, Any]
    """Fields of DrawingSpec; None: the usual."""
    ks: Sequence[int]
    pass_score: float | None
    concurrency: int
    overrides: list[str]
    out: Path | None
    as_json: bool

    def tell(self, text: str) -> None:
        """A line about what happens."""
        if not self.as_json:
            print(f"{text} ...", flush=True)


def _is_result(word: str) -> bool:
    return word.endswith(".json") and Path(word).is_file()


def _check(
    given: Sequence[str],
    url: str | None,
    ks: Sequence[int],
    samples: int,
    out: Path | None,
    *,
    is_live: bool,
) -> None:
    if is_live and (url is not None or len(given) != 1):
        raise RecipeError("--live asks one run: name it, without --url")
    if url is None and not given:
        raise RecipeError("POLICY is missing: name a run, a checkpoint or a model folder, or --url")
    if url is not None and len(given) > 1:
        raise RecipeError("--url is one policy: beside it name one run at most")
    if out is not None and len(given) > 1:
        raise RecipeError("--out is one file: name one policy, or leave it out")
    if ks and max(ks) > samples:
        raise RecipeError(
            f"--pass-at has {max(ks)}, but --samples is {samples}: draw as many at least"
        )


def _asked(
    url: str, variable: str | None, model: str | None, tokenizer: Path | None, concurrency: int
) -> AskedSpec:
    try:
        check_url(url, ("http", "https"))
        if variable is not None:
            check_token_is_safe(url)
    except ValueError as error:
        told = (
            str(error).replace("urls has", "--url is").replace("token_variable", "--key-variable")
        )
        raise RecipeError(told) from error
    if variable is not None:
        try:
            _VARIABLE.validate_python(variable)
        except ValidationError as error:
            told = on_one_line(error.errors()[0]["msg"])
            raise RecipeError(f"--key-variable: {told}") from error
    return AskedSpec(
        url=url,
        model=model,
        key_variable=variable,
        tokenizer=None if tokenizer is None else tokenizer.absolute(),
        concurrency=concurrency,
    )


def _drawing(wish: _Wish, recipe: Recipe | None) -> DrawingSpec:
    """As the command line says, else as the run's own evaluation draws."""
    chosen = {name: value for name, value in wish.drawing.items() if value is not None}
    sampling = None if recipe is None else recipe.sampling
    is_drawn = chosen.get("temperature", 0.0 if chosen["samples"] == 1 else 1.0) > 0
    usual: dict[str, Any] = {"temperature": 1.0 if is_drawn else 0.0}
    if sampling is not None:
        usual["max_tokens"] = sampling.max_new_tokens
        usual |= {"stop": sampling.stop, "stop_token_ids": sampling.stop_token_ids}
        if is_drawn:
            usual |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
            usual |= {"top_k": sampling.top_k} if sampling.top_k > 0 else {}
    try:
        drawing = DrawingSpec.model_validate({**usual, **chosen})
    except ValidationError as error:
        problem = error.errors()[0]
        name = str(problem["loc"][-1]).replace("_", "-")
        raise RecipeError(f"--{name}: {on_one_line(problem['msg'])}") from error
    if drawing.samples > 1 and drawing.temperature == 0:
        raise RecipeError(
            f"--samples is {drawing.samples} with --temperature 0, which makes all of a prompt's "
            "completions the same: give a temperature above 0, or one sample"
        )
    return drawing


def _question(asked: AskedSpec, wish: _Wish, recipe: Recipe | None) -> EvaluationQuestion:
    words = wish.tasks or ((HELD_OUT,) if recipe is not None else ())
    model = None if recipe is None or recipe.actor is None else recipe.actor.model.path
    return EvaluationQuestion(
        asked=asked,
        drawing=_drawing(wish, recipe),
        tasks=tuple(tasks_of(words, recipe, size=wish.size, answer_tag=wish.answer_tag)),
        data_tokenizer=None if model is None else Path(model).absolute(),
    )


def _of_policy(policy: Policy, wish: _Wish) -> EvaluationFile:
    """Serves a policy and scores it."""
    recipe = None if policy.run is None else run_recipe(policy.run)
    serving = wished(policy, wish.overrides)
    # Whatever is wrong with the tasks shows before a model is loaded.
    question = _question(AskedSpec(url="http://127.0.0.1"), wish, recipe)
    check_can_serve(serving.endpoint)
    key = secrets.token_urlsafe(32)
    wish.tell(policy.name)
    with served(policy, serving, key=key, tell=wish.tell) as answering:
        asked = AskedSpec(
            url=answering.url,
            model=answering.model,
            key_variable=KEY_VARIABLE,
            tokenizer=answering.folder,
            concurrency=wish.concurrency,
        )
        question = question.model_copy(update={"asked": asked})
        facts = {"policy_version": policy.version, "rollout": dict(serving.rollout)}
        return _scored(
            question, wish, key=key, name=policy.name, run=policy.run, step=policy.step, facts=facts
        )


def _run_of(word: str) -> Path:
    """The folder of the run that is named beside --url, or with --live."""
    run = Path(word) if Path(word).is_dir() else run_of_id(word)
    if not is_run(run):
        raise RecipeError(f"{run} is no run: with --url or --live name the folder or id of a run")
    return run


def _of_url(asked: AskedSpec, given: Sequence[str], wish: _Wish) -> EvaluationFile:
    """Asks an endpoint that is there."""
    run = _run_of(given[0]) if given else None
    question = _question(asked, wish, None if run is None else run_recipe(run))
    shown = masked_url(asked.url)
    step = None if run is None else read_status(run).step
    name = shown if run is None else f"{run}, live from step {step}"
    key = key_of(asked.key_variable)
    return _scored(question, wish, key=key, name=name, run=run, step=step, facts={"url": shown})


def _scored(
    question: EvaluationQuestion,
    wish: _Wish,
    *,
    key: str | None,
    name: str,
    run: Path | None,
    step: int | None,
    facts: Mapping[str, Any],
) -> EvaluationFile:
    stem = "policy" if step is None else f"step-{step:08d}"
    path = wish.out or new_path((run or Path()) / FOLDER, stem)
    began = time.time()
    with _rows_file(rows_beside(path, ROWS_SUFFIX)) as rows:
        result = scored(question, key=key, rows=rows, pass_score=wish.pass_score, tell=wish.tell)
    ended = {} if run is None or "url" not in facts else {"step_after": read_status(run).step}
    if ended and ended["step_after"] != step:
        wish.tell(
            f"the run has come from step {step} to {ended['step_after']} meanwhile: the scores are "
            "of weights in between, and stand at the first"
        )
    found = EvaluationFile(
        policy=name,
        step=step,
        tasks=result.tasks,
        ks=wish.ks,
        facts={
            **facts,
            **ended,
            "model": result.model,
            "evaluated_at": round(began, 3),
            "seconds": round(time.time() - began, 3),
            "drawing": question.drawing.model_dump(mode="json"),
            "asked_with": "messages" if question.asked.tokenizer is None else "token ids",
            "specs": {task.name: plain(task) for task in question.tasks},
        },
    )
    # Raises before anything is written where pass@k has no meaning.
    found.metrics()
    write_evaluation(path, found, run)
    if wish.as_json:
        told = {name: task.to_dict(wish.ks) for name, task in found.tasks.items()}
        for task in told.values():
            del task["scores"]
        JsonConsole().write("evaluation", {"policy": name, "file": str(path), "tasks": told})
    else:
        show_evaluation(Console(), found)
        print(f"written: {path}\n")
    return found


@contextlib.contextmanager
def _rows_file(path: Path) -> Iterator[Any]:
    """A file that is there once it is whole."""
    draft = path.with_name(f".{path.name}")
    try:
        with draft.open("w", encoding="utf-8") as file:
            yield file
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _show_differences(found: Sequence[EvaluationFile], *, as_json: bool) -> None:
    """Each but the first against the first."""
    for other in found[1:]:
        compared = compare_tasks(found[0].tasks, other.tasks)
        if as_json:
            for each in compared:
                told = None if each.difference is None else each.difference.to_dict()
                facts = {"first": found[0].policy, "second": other.policy, "task": each.task}
                JsonConsole().write("difference", {**facts, "difference": told})
        elif compared:
            show_differences(Console(), found[0].policy, other.policy, compared)
        else:
            print(f"{found[0].policy} and {other.policy} have no task in common")
