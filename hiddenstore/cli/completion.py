"""Completion in bash, zsh and fish: click's own of commands and options, and a path wherever a word may be one."""

from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    add_completion_class,
)


class _Paths(ShellComplete):
    """Completes a word of a command that nothing else is known of as a path."""

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
        items = super().get_completions(args, incomplete)
        is_word_of_command = bool(args) and not incomplete.startswith("-")
        return items or ([CompletionItem(incomplete, type="file")] if is_word_of_command else [])


def complete_paths() -> None:
    """Make click complete paths too, in every shell it knows."""
    for shell in (BashComplete, ZshComplete, FishComplete):
        add_completion_class(type(shell.__name__, (_Paths, shell), {}))
