"""Find contradictions among the settings of tasks, mixture, curriculum and evaluation."""

from __future__ import annotations

from collections.abc import Iterator

from actors.environment.settings import GROUP_REWARD, MIXTURE_PERIOD
from actors.types import SESSION, UPLOADED
from service.config.kept_tokens import kept_tokens_problems
from service.config.tree import Config, EvaluationSetSettings, TasksSettings


def _check_tasks(config: Config) -> Iterator[str]:
    tasks = config.tasks
    if tasks.file is not None and tasks.dataset is not None:
        yield (
            "tasks.file and tasks.dataset are both set; expected one of them: a file has tasks as "
            "they are, a data set columns of its own; remove one"
        )
    if tasks.dataset is None:
        for key, is_set in (
            ("columns", bool(tasks.columns)),
            ("subset", tasks.subset is not None),
            ("evaluation_split", tasks.evaluation_split is not None),
        ):
            if is_set:
                yield (
                    f"tasks.{key} is set without tasks.dataset, to which it belongs; expected "
                    "both; set tasks.dataset"
                )


def _check_mixture(config: Config) -> Iterator[str]:
    if not config.mixture:
        if not config.tasks.environment:
            yield (
                "tasks.environment is not set and there is no mixture; expected one of them; name "
                "an environment, such as guessing"
            )
        return
    if config.tasks != TasksSettings():
        yield (
            "tasks and mixture are both set; expected one of them: each part of a mixture has "
            "tasks of its own; move them to mixture.NAME.tasks"
        )
    if config.evaluation.sets:
        yield (
            "evaluation.sets is set with a mixture, whose parts are evaluated each as a set of its "
            "own; leave it out, or make a part of it"
        )
    if len(config.mixture) > MIXTURE_PERIOD:
        yield f"mixture has {len(config.mixture)} parts, expected at most {MIXTURE_PERIOD}"
    whole = sum(each.weight for each in config.mixture.values())
    for name, each in config.mixture.items():
        if each.weight / whole < 1 / MIXTURE_PERIOD:
            yield (
                f"mixture.{name}.weight is {each.weight:g} of {whole:g}, expected at least one in "
                f"{MIXTURE_PERIOD}; raise it"
            )
        if each.tasks.environment == SESSION:
            yield (
                f"mixture.{name}.tasks.environment is session, expected an environment: agents "
                "outside bring their own tasks, to any run of `rayloom serve`"
            )
        if name in (SESSION, UPLOADED):
            yield f"mixture.{name}: this name is taken by rollouts of clients; choose another"


def _check_curriculum(config: Config) -> Iterator[str]:
    settings = config.curriculum
    if not settings.is_on:
        return
    if settings.hopeless_to >= settings.solved_from:
        yield (
            f"curriculum.hopeless_to is {settings.hopeless_to:g}, expected less than "
            f"curriculum.solved_from ({settings.solved_from:g}); lower it"
        )
    tasks = config.tasks
    if not config.mixture and tasks.file is None and tasks.dataset is None and tasks.environment:
        yield (
            "curriculum is set, but the seed makes every task and none is repeated; expected "
            "tasks.file, tasks.dataset or a mixture; leave it out"
        )


def _check_evaluation(config: Config) -> Iterator[str]:
    named = {"evaluation": config.evaluation} | {
        f"evaluation.sets.{name}": each for name, each in config.evaluation.sets.items()
    }
    for key, settings in named.items():
        if settings.samples > 1 and settings.temperature == 0:
            yield (
                f"{key}.samples is {settings.samples} with temperature 0, where all samples of a "
                "task are the same; expected a temperature above 0, or one sample; set one of them"
            )
        sampling = settings.sampling
        yield from kept_tokens_problems(key, sampling.kept, temperature=sampling.temperature)
    tasks = config.tasks
    scores_answers = any(tasks.options.get(name) for name in ("reward", "judges", "tools"))
    is_evaluated = tasks.evaluation_tasks > 0 or bool(config.evaluation.sets)
    if tasks.options.get(GROUP_REWARD) and not scores_answers and is_evaluated:
        yield (
            "tasks.options.group_reward is set without tasks.options.reward, and tasks are held "
            "out for evaluations, whose answers are in no group; expected a function that scores "
            "one answer, or no evaluation; set one of them, or tasks.evaluation_tasks to 0"
        )
    for name, each in config.evaluation.sets.items():
        yield from _check_set(config, f"evaluation.sets.{name}", each)


def _check_sessions(config: Config) -> Iterator[str]:
    tasks = config.tasks
    if config.has_environment:
        return
    if tasks.evaluation_tasks:
        yield (
            f"tasks.evaluation_tasks is {tasks.evaluation_tasks} with tasks.environment session: "
            "nothing here can play them; expected 0; set it"
        )
    for given in ("file", "dataset", "options"):
        if not getattr(tasks, given):
            continue
        yield (
            f"tasks.{given} is set with tasks.environment session, whose tasks come with the "
            "sessions; leave it out"
        )


def _check_set(config: Config, key: str, settings: EvaluationSetSettings) -> Iterator[str]:
    if settings.file is not None and settings.dataset is not None:
        yield f"{key}.file and {key}.dataset are both set; expected one of them; remove one"
    of_data_set = ("subset", "split", "columns")
    is_of_data_set = any(getattr(settings, name) is not None for name in of_data_set)
    has_data_set = settings.dataset is not None or config.tasks.dataset is not None
    if is_of_data_set and (settings.file is not None or not has_data_set):
        yield (
            f"{key} names a subset, a split or columns without a dataset to which they belong; "
            "expected one there or in tasks, and no file; set it, or leave them out"
        )
    has_own = is_of_data_set or settings.file is not None or settings.dataset is not None
    if not has_own and not config.tasks.evaluation_tasks:
        yield (
            f"{key} names no tasks, and tasks.evaluation_tasks is 0, so that the set is empty; "
            "name a file, a dataset or a split, or raise tasks.evaluation_tasks"
        )
    if not config.has_environment:
        yield (
            f"{key} is set with tasks.environment session: nothing here can play it; leave it out"
        )


TASK_CHECKS = (
    _check_tasks,
    _check_mixture,
    _check_curriculum,
    _check_evaluation,
    _check_sessions,
)
