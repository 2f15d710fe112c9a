"""Format texts that mention options, which the command line and Python write differently.

    with_options("add {resume}, or set {input_type:protein} in {path}", path=printable(path))

gives ``add --resume, or set --input-type protein`` on the command line, and ``add resume=True, or
set input_type='protein'`` in Python. Only the template is searched for names, so user text that
looks like an option is never changed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from string import Formatter
from typing import NamedTuple


class OptionName(NamedTuple):
    """An option in a text: the name of its field, and optionally a value."""

    name: str
    value: str = ""  # ``no`` switches off an option that is on by default
    word: str = ""  # command-line spelling, if it does not follow from the name
    is_bare: bool = False  # in Python, only the name, even for a flag

    @property
    def on_command_line(self) -> str:
        name = self.name.replace("_", "-")
        if self.value == "no":
            return f"--no-{name}"
        return f"{self.word or f'--{name}'} {self.value}".rstrip()

    def in_python(self, flags: Collection[str]) -> str:
        """Format the option as a Python argument. Options in ``flags`` have no value."""
        if self.is_bare or not (self.value or self.name in flags):
            return self.name
        if self.name in flags:
            return f"{self.name}={self.value != 'no'}"
        is_number = self.value.replace(".", "", 1).isdecimal()
        return f"{self.name}={self.value if is_number else repr(self.value)}"


class OptionText(str):
    """A text with options. As a string, it is the command-line text."""

    parts: tuple[str | OptionName, ...]

    def __new__(cls, text: str, parts: tuple[str | OptionName, ...] = ()) -> OptionText:
        self = super().__new__(cls, text)
        self.parts = parts or (text,)
        return self

    @property
    def names(self) -> set[str]:
        """Return the options that the text mentions."""
        return {part.name for part in self.parts if isinstance(part, OptionName)}

    def in_python(self, flags: Collection[str]) -> str:
        """Format the text with its options as Python arguments."""
        return "".join(
            part.in_python(flags) if isinstance(part, OptionName) else part for part in self.parts
        )


def with_options(template: str, **values: object) -> OptionText:
    """Fill a template. Fields that are not among the values are options.

    An option may have a value, either in the template (``{device:cpu}``) or from the values
    (``{device:{kind}}``).
    """
    parts = list[str | OptionName]()
    for text, name, value, _ in Formatter().parse(template):
        parts.append(text)
        if name is None:
            continue
        if name in values:
            own = values[name]
            parts.extend(own.parts if isinstance(own, OptionText) else (str(own),))
        else:
            parts.append(OptionName(name, (value or "").format_map(values)))
    return join_words(parts)


def join_texts(separator: str, texts: Iterable[str]) -> OptionText:
    """Join texts, which may mention options."""
    parts = list[str | OptionName]()
    for text in texts:
        parts += [separator] if parts else []
        parts += text.parts if isinstance(text, OptionText) else (text,)
    return join_words(parts)


def join_words(parts: Iterable[str | OptionName]) -> OptionText:
    """Build a text from its parts."""
    parts = tuple(parts)
    shown = (part if isinstance(part, str) else part.on_command_line for part in parts)
    return OptionText("".join(shown), parts)
