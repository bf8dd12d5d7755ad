"""The explanations of the numbers on a run's page. Pure."""

from __future__ import annotations

from actors.statistics import BY_NAME, STATISTICS
from service.report.tables import words
from service.telemetry.totals import RunTotals


def statistic_definitions(totals: RunTotals) -> tuple[tuple[str, str], ...]:
    """Return the values from which the known statistics are computed, each with its explanation."""
    found = {
        (words(each.values), each.help): each.name
        for each in STATISTICS
        if each.name in totals.statistics
    }
    return tuple((values, help_of(name)) for (values, _), name in found.items())


def definitions() -> tuple[tuple[str, str], ...]:
    """Return the name and the explanation of each number on the run's page."""
    return (
        (
            "Reward",
            "mean return of a step's graded trajectories, divided by the best possible return "
            "if the environment knows it; first and last are means over five steps.",
        ),
        (
            "Memory",
            "largest memory of all processes of the run together; a page that they share "
            "counts once.",
        ),
        (
            "Evaluation",
            "mean return over all samples of the held-out tasks (evaluation.samples), scaled as "
            "the reward; never trained on.",
        ),
        (
            "Policy version",
            "a counter of published weights; it grows by one each step.",
        ),
        (
            "Policy age",
            "number of versions that a token was older than the trainer when it was trained on.",
        ),
        (
            "Mismatch",
            "Δ = trainer − engine log-probability of the same token under the same "  # noqa: RUF001
            "weights, nats; k3 = exp(Δ) − 1 − Δ, averaged over steps by their trained tokens.",  # noqa: RUF001
        ),
        (
            "Check after publish",
            "largest |Δ| on one fixed prompt, right after each publish, over all engines.",
        ),
        (
            "Ledger",
            "every admitted rollout leaves exactly once: trained, or evicted with one reason.",
        ),
        ("Merge ratio", "turns divided by the training samples that they became."),
        (
            "Sampled tokens",
            "engine output of all attempts, also of attempts that no step took; \"in the steps' "
            'trajectories" counts only the others.',
        ),
        ("Trained tokens", "tokens in the loss."),
        ("Clip fraction", "trained tokens whose ratio was clipped, of all trained tokens."),
        ("Loss", help_of("loss")),
        ("Entropy", help_of("entropy_mean")),
        ("Effective sample size", help_of("effective_sample_size")),
        (
            "Zero-variance groups",
            "groups of a step whose members all had the same return.",
        ),
        ("Gradient norm", help_of("grad_norm")),
        ("Malformed share", "turns whose action could not be read, of all turns."),
        (
            "Stage times",
            "wall seconds of the training loop; collect is the wait for closed groups.",
        ),
    )


def help_of(name: str) -> str:
    """Return the explanation of a statistic, worded to follow its name on the page."""
    text = BY_NAME[name].help.replace("`", "")
    return text[0].lower() + text[1:]
