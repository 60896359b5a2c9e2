"""Fails on a C++ function of more than 60 lines or with more than 8 parameters.

Reads C++ as it stands in the files, formatted by clang-format: comments, strings and preprocessor lines are
taken out, then braces say what is a function. Lines are counted from the signature to the closing brace. A
lambda counts as part of its function, and its parameters count as a function's do.

Usage: python check_functions.py FILE_OR_FOLDER...
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MOST_LINES = 60
MOST_PARAMETERS = 8

# What is no code. Its line breaks stay, so that lines keep their numbers.
SKIPPED = re.compile(
    r"//[^\n]*|/\*.*?\*/"
    r'|(?:u8|[uUL])?R"(?P<fence>[^()\s\\]*)\(.*?\)(?P=fence)"'
    r'|"(?:\\.|[^"\\\n])*"'
    r"|(?<![0-9A-Fa-f])'(?:\\.|[^'\\\n])*'"
    r"|^[ \t]*#(?:\\\n|[^\n])*",
    re.DOTALL | re.MULTILINE,
)
TOKEN = re.compile(r"\w+|::|->|[^\s\w]")
OPENING = {"(": ")", "[": "]", "{": "}", "<": ">"}
# A parenthesis after one of these holds no parameters.
NO_PARAMETERS = {
    *("alignas", "decltype", "explicit", "noexcept", "requires", "sizeof", "__attribute__", "static_assert"),
    *("if", "for", "while", "switch", "catch", "return"),
}
TYPES = {"class", "struct", "union"}
ACCESS = {"public", "private", "protected"}


@dataclass(frozen=True)
class Token:
    """A word or a sign, and where it stands."""

    text: str
    line: int


@dataclass(frozen=True)
class Finding:
    """A function that is too long, or that takes too much."""

    line: int
    message: str


def tokens_of(source: str) -> list[Token]:
    """The tokens of C++ code, without comments, the insides of strings and preprocessor lines."""

    def blank(match: re.Match[str]) -> str:
        text = match.group()
        is_literal = text.lstrip()[0] not in "#/"
        inside = "" if not is_literal else '""' if text.endswith('"') else "0"
        return inside + "\n" * text.count("\n")

    lines = SKIPPED.sub(blank, source).split("\n")
    return [Token(text, number) for number, line in enumerate(lines, 1) for text in TOKEN.findall(line)]


def texts_of(tokens: list[Token]) -> list[str]:
    """The words and signs alone."""
    return [token.text for token in tokens]


def closing(tokens: list[Token], opening: int) -> int:
    """Where the bracket that opens at `opening` closes; angle brackets only count among themselves."""
    pair = (tokens[opening].text, OPENING[tokens[opening].text])
    depth = 0
    for at in range(opening, len(tokens)):
        text = tokens[at].text
        if pair[0] == "<" and text in ("(", "{"):
            continue
        depth += (text == pair[0]) - (text == pair[1])
        if depth == 0:
            return at
    return len(tokens) - 1


def parameters_in(tokens: list[Token]) -> int:
    """How many parameters stand between two parentheses."""
    if not tokens or texts_of(tokens) == ["void"]:
        return 0
    depth, commas = 0, 0
    for token in tokens:
        depth += (token.text in OPENING) - (token.text in OPENING.values())
        commas += token.text == "," and depth == 0
    return commas + 1


def without_template(header: list[Token]) -> list[Token]:
    """A declaration without the `template <...>` in front of it."""
    while len(header) > 1 and header[0].text == "template" and header[1].text == "<":
        header = header[closing(header, 1) + 1 :]
    return header


def parameter_lists(header: list[Token]) -> list[int]:
    """How many parameters each parenthesis of a declaration holds, up to a constructor's initialisers."""
    counts = []
    at = 0
    while at < len(header):
        text = header[at].text
        if text == ":":
            break
        if text == "(":
            end = closing(header, at)
            if at > 0 and header[at - 1].text not in NO_PARAMETERS:
                counts.append(parameters_in(header[at + 1 : end]))
            at = end
        at += 1
    return counts


def is_initialiser(header: list[Token]) -> bool:
    """Whether the brace after `header` is not a body: `= {`, `member_{` of a constructor, `Type name{`."""
    texts = texts_of(header)
    before = texts[-1]
    if before in ("=", ",", "("):
        return True
    colons = [at for at, text in enumerate(texts) if text == ":"]
    if colons and ")" in texts[: colons[0]]:  # a constructor: every member is a name and a bracket
        return bool(re.match(r"\w+$|>$", before))
    return False


def lambdas(body: list[Token]) -> Iterator[tuple[int, int]]:
    """Line and number of parameters of every lambda."""
    for at in range(len(body) - 1):
        if body[at].text == "]" and body[at + 1].text == "(":
            end = closing(body, at + 1)
            after = body[end + 1].text if end + 1 < len(body) else ""
            if after in ("{", "->", "mutable", "noexcept", "constexpr"):
                yield body[at].line, parameters_in(body[at + 2 : end])


def name_of(header: list[Token]) -> str:
    """The word before the parameters."""
    for at in range(1, len(header)):
        if header[at].text == "(" and header[at - 1].text not in NO_PARAMETERS:
            return header[at - 1].text
    return header[0].text


def check_parameters(header: list[Token]) -> Iterator[Finding]:
    """A function, declared or defined, with too many parameters."""
    if not header:
        return
    most = max(parameter_lists(header), default=0)
    if most > MOST_PARAMETERS:
        yield Finding(header[0].line, f"{name_of(header)} has {most} parameters")


def check_function(header: list[Token], body: list[Token]) -> Iterator[Finding]:
    """A function that is too long, or has a lambda with too many parameters."""
    length = body[-1].line - header[0].line + 1
    if length > MOST_LINES:
        yield Finding(header[0].line, f"{name_of(header)} has {length} lines")
    for line, count in lambdas(body):
        if count > MOST_PARAMETERS:
            yield Finding(line, f"a lambda in {name_of(header)} has {count} parameters")


def opens_scope(header: list[Token]) -> bool:
    """Whether declarations follow the brace: a namespace, `extern "C"`, a class."""
    texts = texts_of(header)
    if not texts or "namespace" in texts or (texts[0] == "extern" and "(" not in texts):
        return True
    if "enum" in texts or "=" in texts:
        return False
    return bool(TYPES & set(texts)) and not any(parameter_lists(header)) and texts[-1] != ")"


def findings(source: str) -> list[Finding]:
    """Everything in a file that is too long or takes too much."""
    tokens = tokens_of(source)
    found: list[Finding] = []
    header: list[Token] = []  # of the declaration so far
    at = 0
    while at < len(tokens):
        text = tokens[at].text
        declaration = without_template(header)
        end = closing(tokens, at) if text in ("(", "[", "{") else at
        block = tokens[at : end + 1]
        if text == "}" or (text == "{" and opens_scope(declaration)):
            header, end = [], at
        elif text == ";":
            found += [] if "=" in texts_of(declaration[:-1]) else check_parameters(declaration)
            header = []
        elif text == ":" and texts_of(header) in [[access] for access in ACCESS]:
            header = []
        elif text == "{" and parameter_lists(declaration) and not is_initialiser(declaration):
            found += [*check_parameters(declaration), *check_function(declaration, block)]
            header = []
        else:
            header += block
        at = end + 1
    return found


def main(paths: list[str]) -> int:
    """Prints what was found, as compilers do."""
    failed = False
    for path in map(Path, paths):
        files = sorted(f for f in path.rglob("*") if f.suffix in (".h", ".cpp")) if path.is_dir() else [path]
        for file in files:
            for finding in findings(file.read_text()):
                failed = True
                print(f"{file}:{finding.line}: {finding.message}", file=sys.stderr)
    if failed:
        print(f"at most {MOST_LINES} lines and {MOST_PARAMETERS} parameters", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
