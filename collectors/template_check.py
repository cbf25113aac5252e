"""Whether masks can be had from a chat template: tried on conversations of a line or two, before any data is read."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NoReturn

from collectors.conversations import Conversation, Message
from collectors.rows import Problem
from collectors.template import NOT_STABLE, ChatTemplate, template_errors
from collectors.turns import RewrittenError
from hiddenstore.errors import ConfigError

_TAGS_HINT = "give a template with {% generation %} tags: --template FILE"
_PROBE_ANSWERS = ("It is four.", "<think>\nTwo and two.\n</think>\n\nIt is four.")


def check_template(template: ChatTemplate) -> None:
    """Try a template on a two-message conversation before any data is read.

    Raises:
        ConfigError: ``template-invalid``, ``template-no-assistant``, ``mask-empty`` or
            ``template-not-prefix-stable``.
    """
    answer = _PROBE_ANSWERS[0]
    probe = _probe([answer])
    try:
        text, generated = template.rendered(probe)
    except template_errors() as error:
        if type(error).__name__ == "TemplateSyntaxError":
            raise ConfigError(
                f"the chat template cannot be parsed: line {getattr(error, 'lineno', '?')}: {error}",
                kind="template-invalid",
            ) from error
        return  # A template may demand more than the probe has; the rows will tell.
    if answer not in text:
        raise ConfigError(
            "the chat template writes nothing of the assistant's messages",
            kind="template-no-assistant",
            hint=_TAGS_HINT,
        )
    if template.loss_on == "all":
        return
    if template.is_tagged and answer not in "".join(text[start:end] for start, end in generated):
        raise ConfigError(
            "the {% generation %} tags of the chat template do not hold the assistant's text: the mask is empty",
            kind="mask-empty",
            hint="put the answer between {% generation %} and {% endgeneration %}: --template FILE",
        )
    if not template.is_tagged:
        _check_prefixes(template, probe, text, answer)


def refuse_if_unstable(template: ChatTemplate, problem: Problem) -> None:
    """Raise when a row that was not prefix-stable is the template's doing and not that row's.

    Raises:
        ConfigError: ``template-not-prefix-stable``.
    """
    if _rewrites_history(template):
        _unstable(template, f"{problem.place}: {problem.detail}")


@lru_cache(maxsize=1)
def _rewrites_history(template: ChatTemplate) -> bool:
    return any(
        isinstance(result, Problem) and result.reason == NOT_STABLE
        for result in template.tokenise([_probe([answer, answer]) for answer in _PROBE_ANSWERS])
    )


def _check_prefixes(template: ChatTemplate, probe: Conversation, text: str, answer: str) -> None:
    try:
        start, end = template.prefixes(probe, text).answer(1, template.end_tokens)
    except RewrittenError as error:
        _unstable(template, str(error), is_single_turn=True)
    if answer not in text[start:end]:
        _unstable(template, "the generation prompt already holds part of the answer", is_single_turn=True)
    header = text[start : text.index(answer, start)]
    if "add_generation_prompt" not in template.text_for(None) and any(token in header for token in template.end_tokens):
        raise ConfigError(
            f"the chat template ignores add_generation_prompt: {header!r} before an answer would be supervised",
            kind="template-not-prefix-stable",
            hint=_TAGS_HINT,
        )


def _unstable(template: ChatTemplate, detail: str, is_single_turn: bool = False) -> NoReturn:
    others = "--loss-on all"
    if not is_single_turn and template.loss_on == "assistant":
        others = "--loss-on last-turn or --loss-on all"
    why = "renders a prompt otherwise once it is answered" if is_single_turn else "rewrites earlier turns"
    raise ConfigError(
        f"the chat template has no {{% generation %}} tags and {why}, so that rendered prefixes do not show "
        f"what the target writes\n{detail}",
        kind="template-not-prefix-stable",
        hint=f"{_TAGS_HINT}; or {others}",
    )


def _probe(answers: Sequence[str]) -> Conversation:
    messages: list[Message] = []
    for answer in answers:
        messages += [
            {"role": "user", "content": "What is two and two?"},
            {"role": "assistant", "content": answer},
        ]
    return Conversation("probe", messages)
