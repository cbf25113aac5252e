"""A chat template tried on a conversation of two messages, so that a fault of its own is told before any row's."""

from collections.abc import Sequence
from functools import lru_cache

from jinja2 import TemplateSyntaxError

from collectors.tokenize.template import NOT_STABLE, ChatTemplate, RewrittenError
from hiddenstore.conversation import Conversation, Message, Problem
from hiddenstore.errors import ConfigError, Kind
from hiddenstore.targets.rendering import RENDER_ERRORS

_TAGS_HINT = "give a template with {% generation %} tags: --template FILE"
_PROBE_ANSWERS = ("It is four.", "<think>\nTwo and two.\n</think>\n\nIt is four.")


def check_template(template: ChatTemplate) -> None:
    """Try a template on a two-message conversation before any data is read. Raises ConfigError: ``template-invalid``,
    ``mask-empty`` or ``template-unstable``."""
    answer, _ = _PROBE_ANSWERS[0], template.date
    probe = _probe([answer])
    try:
        text, tagged = template.render(probe)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template cannot be parsed: line {error.lineno}: {error}", kind=Kind.TEMPLATE_INVALID
        ) from error
    except RENDER_ERRORS:
        return  # A template may demand more than the probe has; the rows will tell.
    if answer not in text:
        problem = "the chat template writes nothing of the assistant's messages"
        raise ConfigError(problem, kind=Kind.TEMPLATE_INVALID, hint=_TAGS_HINT)
    if template.loss_on == "all":
        return
    if not template.is_tagged:
        _check_prefixes(template, probe, text, answer)
    elif answer not in "".join(text[start:end] for start, end in tagged):
        raise ConfigError(
            "the {% generation %} tags of the chat template do not hold the assistant's text: the mask is empty",
            kind=Kind.MASK_EMPTY,
            hint="put the answer between {% generation %} and {% endgeneration %}: --template FILE",
        )


def refuse_if_unstable(template: ChatTemplate, problem: Problem) -> None:
    """ConfigError ``template-unstable`` where the template and not the row is at fault."""
    if _rewrites_history(template):
        raise _unstable(template, f"{problem.location}: {problem.detail}")


@lru_cache(maxsize=1)
def _rewrites_history(template: ChatTemplate) -> bool:
    return any(
        isinstance(result, Problem) and result.reason == NOT_STABLE
        for result in template.tokenise([_probe([answer, answer]) for answer in _PROBE_ANSWERS])
    )


def _check_prefixes(template: ChatTemplate, probe: Conversation, text: str, answer: str) -> None:
    try:
        start, end = template.prefixes(probe, text).answer(1)
    except RewrittenError as error:
        raise _unstable(template, str(error), is_single_turn=True) from error
    if answer not in text[start:end]:
        raise _unstable(template, "the generation prompt already holds part of the answer", is_single_turn=True)
    header = text[start : text.index(answer, start)]
    if "add_generation_prompt" not in template.text_for(None) and any(token in header for token in template.end_tokens):
        problem = f"the chat template ignores add_generation_prompt: {header!r} before an answer would be supervised"
        raise ConfigError(problem, kind=Kind.TEMPLATE_UNSTABLE, hint=_TAGS_HINT)


def _unstable(template: ChatTemplate, detail: str, is_single_turn: bool = False) -> ConfigError:
    options = "--loss-on all"
    if not is_single_turn and template.loss_on == "assistant":
        options = "--loss-on last-turn or --loss-on all"
    reason = "renders a prompt otherwise once it is answered" if is_single_turn else "rewrites earlier turns"
    return ConfigError(
        f"the chat template has no {{% generation %}} tags and {reason}, so that rendered prefixes do not show "
        f"what the target writes\n{detail}",
        kind=Kind.TEMPLATE_UNSTABLE,
        hint=f"{_TAGS_HINT}; or {options}",
    )


def _probe(answers: Sequence[str]) -> Conversation:
    messages: list[Message] = []
    for answer in answers:
        messages += [
            {"role": "user", "content": "What is two and two?"},
            {"role": "assistant", "content": answer},
        ]
    return Conversation("probe", messages)
