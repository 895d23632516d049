"""What a teacher is told that the student is not, and the policy as its own teacher."""

from __future__ import annotations

import re
from collections.abc import Iterator
from string import Formatter

from pydantic import Field, field_validator

from rolemesh.engine.specs.base import Spec

_METADATA = "metadata."
_FIELDS = re.compile(r"prompt|answer|metadata\.[^{}]+")


class TeacherPromptSpec(Spec):
    """A prompt of the teacher's own, in which stands more than the student was given.

    The teacher scores the student's completion behind it: a worked answer (OPSD, arXiv 2601.18734),
    a demonstration (SDFT, arXiv 2601.19897), a hint, or what is known of an earlier try (SDPO,
    arXiv 2601.20802).
    """

    template: str = Field(min_length=1)
    """Text of the last user message, as the teacher reads it. {prompt} is that message as the
    student read it, {answer} the row's expected answer, {metadata.NAME} a value of its metadata (a
    dot leads into an object); {{ and }} are braces. The turns before that message stay."""

    @field_validator("template")
    @classmethod
    def _check_fields(cls, template: str) -> str:
        try:
            parsed = list(Formatter().parse(template))
        except ValueError as error:
            raise ValueError(
                f"{error}: write {{{{ and }}}} for braces that are no field"
            ) from error
        for _, field, form, conversion in parsed:
            if field is None:
                continue
            if not _FIELDS.fullmatch(field) or form or conversion:
                whole = (
                    field + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")
                )
                raise ValueError(
                    f"the field {{{whole}}} is none: fields are {{prompt}}, {{answer}} and "
                    "{metadata.NAME}; write {{ and }} for braces that are no field"
                )
        return template

    def parts(self) -> Iterator[tuple[str, str | None]]:
        """Each piece of text with the field that follows it, None behind the last one."""
        for text, field, _, _ in Formatter().parse(self.template):
            yield text, field

    def columns(self) -> tuple[str, ...]:
        """Text columns that it reads."""
        fields = {field for _, field in self.parts() if field is not None}
        answer = ("answer",) if "answer" in fields else ()
        metadata = ("metadata",) if any(one.startswith(_METADATA) for one in fields) else ()
        return ("prompt_text", *answer, *metadata)


class SelfTeacherSpec(Spec):
    """The policy as its own teacher: with which weights it scores, and behind which prompt."""

    average: float | None = Field(default=None, gt=0, lt=1)
    """Part a of the moving average that one optimizer step leaves: average = a * average + (1 - a)
    * weights, in float32, from the run's first weights on. None: the weights as they are now."""
    prompt: TeacherPromptSpec | None = None
    """What it is told as a teacher; None: what it was told as the student."""
