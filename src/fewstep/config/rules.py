"""The rules that join several sections of a recipe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fewstep.config.problems import Problem
from fewstep.errors import UserError
from fewstep.rollout.clip import given_blocks
from fewstep.rollout.few_step import FewStep

OPTIONAL_ROLES = ("teacher", "critic", "discriminator")
MOST_WARM_UP = 1_000_000
"""Iterations up to which the first one is looked for that trains the student."""


def broken_rules(recipe: Any, method_class: Any) -> list[Problem]:
    """Every rule that ``recipe`` (a ``Recipe``, which asks this as its last check) breaks."""
    method = method_class.of(recipe.method, FewStep.of(recipe.sampling, (1, 1, 1, 1)))
    return [
        *_roles(recipe, method),
        *_starts(recipe, method),
        *_parts(recipe, method),
        *_guidance(recipe, method),
        *_warm_up(recipe, method),
        *_given(recipe),
        *_blocks(recipe),
        *_streams(recipe, method),
        *_latents(recipe),
    ]


def _roles(recipe: Any, method: Any) -> Iterator[Problem]:
    """A section for a role that the method has not; a teacher that is not there."""
    name = recipe.method.name
    for role in OPTIONAL_ROLES:
        if getattr(recipe, role) is not None and role not in method.roles:
            without = " without method.gan" if role == "discriminator" and hasattr(recipe.method, "gan") else ""
            yield Problem((role,), f"method '{name}'{without} has no {role}; remove the section", (("method",),))
    if "teacher" in method.roles and recipe.teacher is None:
        yield Problem(("teacher",), f"method '{name}' distils a teacher; write teacher: {{init: <run or folder>}}")


def _starts(recipe: Any, method: Any) -> Iterator[Problem]:
    """Where weights come from: a role that exists, or a network to draw them for."""
    for role in ("student", "critic"):
        section = getattr(recipe, role)
        if section is None or role not in method.roles:
            continue
        if section.init == "random" and section.model is None:
            yield Problem(
                (role, "model"), f"is missing: {role}.init: random needs a network; write its family and size"
            )
        others = [other for other in ("teacher", "student") if other in method.roles and other != role]
        if section.weights == "raw" and section.init in ("random", *others):
            yield Problem((role, "weights"), f"is read where {role}.init is a run; with '{section.init}' leave it out")
        if section.init in ("teacher", "student", "critic", "discriminator") and section.init not in others:
            choices = " or ".join([*others, "random"])
            yield Problem(
                (role, "init"),
                f"method '{recipe.method.name}' has no {section.init} to start from; "
                f"write {choices}, or a run or folder",
                (("method", "name"),),
            )


def _parts(recipe: Any, method: Any) -> Iterator[Problem]:
    if recipe.data.batch % method.row_parts:
        parts = method.row_parts
        yield Problem(
            ("data", "batch"),
            f"method '{recipe.method.name}' cuts the batch into {parts} equal parts; write a multiple of {parts}",
            (("method",),),
        )


def _guidance(recipe: Any, method: Any) -> Iterator[Problem]:
    """Guidance needs an unconditional prediction that was trained; a distilled student is sampled as it was trained."""
    scale, section = recipe.sampling.guidance_scale, recipe.method
    if scale == 1:
        return
    where = ("sampling", "guidance_scale")
    if "critic" in method.roles:
        yield Problem(
            where,
            "the student is trained unguided; write 1.0 (method.guidance_scale guides the teacher)",
            (("method",),),
        )
    elif getattr(section, "cond_dropout", 1) == 0 and recipe.student.init == "random":
        yield Problem(
            where,
            "guidance compares with the null condition, which method.cond_dropout = 0 never trains; write 1.0, or "
            "method.cond_dropout: 0.1",
            (("method", "cond_dropout"),),
        )


def _warm_up(recipe: Any, method: Any) -> Iterator[Problem]:
    def trains(iteration: int) -> bool:
        return any("student" in phase.trains for phase in method.phases(iteration))

    if not trains(recipe.iterations - 1):
        fewest = next((n + 1 for n in range(recipe.iterations, MOST_WARM_UP) if trains(n)), None)
        more = f"{fewest} or more" if fewest else "more"
        yield Problem(
            ("iterations",),
            f"no iteration trains the student, all are warm-up; write {more} iterations, or a lower "
            "method.critic_warmup_updates",
            (("method", "critic_warmup_updates"),),
        )


def _given(recipe: Any) -> Iterator[Problem]:
    """Frames that are given in training are given in sampling."""
    trained = getattr(recipe.method, "given_frames", None)
    if trained is not None and trained != recipe.sampling.given_frames:
        yield Problem(
            ("method", "given_frames"),
            f"the sampler is given {recipe.sampling.given_frames} frames (sampling.given_frames); write the same "
            "number",
            (("sampling", "given_frames"),),
        )


def _blocks(recipe: Any) -> Iterator[Problem]:
    """Clips are whole blocks, and so are the frames that are given; where the recipe itself says both."""
    causal, frames = recipe.student.causal, getattr(recipe.data, "frames", None)
    if causal is None:
        return
    where = (("student", "causal"),)
    if frames is not None:
        try:
            causal.partition(frames)
        except UserError as error:
            yield Problem(("data", "frames"), str(error), where)
    try:
        given_blocks(causal, recipe.sampling.given_frames)
    except UserError as error:
        yield Problem(("sampling", "given_frames"), str(error), where)


def _streams(recipe: Any, method: Any) -> Iterator[Problem]:
    """Rollouts go on, or roll, where there are some."""
    sampling = recipe.sampling
    for key, what in (("stream_chunks", "go on"), ("rolling_blocks", "roll")):
        if getattr(sampling, key) > 1 and not getattr(method, "streams", False):
            yield Problem(
                ("sampling", key),
                f"method '{recipe.method.name}' trains on no rollouts of the student that could {what}; write 1, or "
                "method.name: dmd2 (or sid)",
                (("method", "name"),),
            )


def _latents(recipe: Any) -> Iterator[Problem]:
    """Latents are normalised as such; and there are no pictures of them to look at."""
    are = recipe.data.name == "latents"
    if are != (recipe.codec.name == "latents"):
        wanted = "latents, with mean and std of every channel of the VAE" if are else "identity"
        yield Problem(
            ("codec", "name"), f"the data are {recipe.data.name}; write codec.name: {wanted}", (("data", "name"),)
        )
    if are and recipe.validation is not None:
        yield Problem(
            ("validation",),
            "the data are latents, and only pictures can be judged; write validation: null, and look at what `fewstep "
            "sample` makes with the VAE",
            (("data", "name"),),
        )
