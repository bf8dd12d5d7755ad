"""Check that docstrings, comments, messages and pages are plain English.

Two rules: no phrase of PHRASES, and the first sentence of a function begins with a verb in the
imperative, with "Whether", or with a noun if the function is a property; that of a class does not
begin with a word that makes it a fragment. `make lint` runs this. A line that has a good reason to
keep a phrase says so at its end: `# english: the reason`, or `<!-- english: the reason -->`.

    $ python tests/plain_english.py                  # check the tree
    $ python tests/plain_english.py actors/trainer   # check a package
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CODE = ("actors", "service", "deploy", "rayloom", "benchmarks", "tests")
# The check and its tests quote the phrases.
QUOTING = {Path("tests/plain_english.py"), Path("tests/test_plain_english.py")}
PAGES = ("README.md", "docs")
# Other files with texts: the chart, dashboards, alerts, configurations, the web page, the Makefile.
TEXTS = (
    "helm/**/*.yaml",
    "helm/**/*.tpl",
    "helm/**/*.txt",
    "helm/values.schema.json",
    "deploy/**/*.yaml",
    "deploy/docker/*",
    "docs/**/*.yaml",
    "service/page/src/*",
    "service/page/page.html",
    "tests/mutants.toml",
    "tests/**/*.ts",
    "Makefile",
    "pyproject.toml",
    ".ci/run",
)
# Each phrase with what to write. A phrase is here because it was used for something else than an
# English reader takes it for.
PHRASES = {
    r"(is|are|was|were|be|been|gets?) told|told (as|of|by|in|what|whether|how|that|to)": (
        "is shown, is reported, receives"
    ),
    r"tells? (of|apart)": "reports, distinguishes",
    r"go(es)? on": "continues, resumes",
    r"comes? to(?! an? end)": "totals, results in, reaches",
    r"(lies?|lay|lain) (in|at|under|on|beside|behind|there|within|ahead)": "is, is stored in",
    r"(stands?|stood) (in|at|for|there|under|behind|by itself|alone)": "is, is written in",
    r"as (it|they) stands?": "as it is, unchanged",
    r"of (those|them) (of|that|who|which|whose)": "name the things: 'the ended rollouts'",
    r"(is|are|was|were) asked (for|of)": "is requested",
    r"lets? go( of)?": "release",
    r"(to|can|could|may) be had": "is available, can be obtained",
    r"for ever|without end": "forever, without a limit",
    r"held (to|against)": "compared with",
    r"in hand": "current",
    r"but for": "except",
    r"anew|likewise": "again, also",
    r"(so|as) many (of|as there)": "a number of, up to N of",
    r"whose it is": "the owner",
    r"(the|this|these|that|its|their|a) \w+ alone": "only the ...",
    r"behind (it|them|the (last|first|step|turn|end|prompt|token|version)|each|every)": "after",
    r"where (one|none|there|nothing|nobody|that) (is|are|has|have|was|does|can)": "if, when",
    r"where (it|they) (has|have|does|do|can)": "if, when",
    r"what (is|was|there is|it is|they are) (left|there|so|known|to be)": "name the thing",
    r"(?<!there )(?<!There )(?<!that )(is|are) no (?!longer|more|less|such|need|way|other)\w+": (
        "is not a"
    ),
    r"(has|have) its (place|say)": "name what it does",
}
FORBIDDEN = [(re.compile(rf"\b({phrase})\b"), plain) for phrase, plain in PHRASES.items()]
WAIVER = re.compile(r"english: *\S+ +\S+")
# Words that begin a fragment, not a sentence with a verb in the imperative.
FRAGMENT = frozenset(
    "of as how those that which where who whose why by for from in into with without within at on "
    "to under over until behind beside told none its it this these each every all no nothing once "
    "so and or but if when two three what".split()
)
NOUN = frozenset("the a an one".split())


class Finding(NamedTuple):
    """A place in the tree, what was found, and what to write."""

    path: str
    line: int
    found: str
    instead: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.found}; write: {self.instead}"


def check_text(path: str, line: int, text: str, waived: frozenset[int]) -> Iterator[Finding]:
    """Yield the forbidden phrases of a text that begins at a line."""
    flat = re.sub(r"`[^`\n]*`", lambda code: "x" * len(code[0]), text)
    for pattern, plain in FORBIDDEN:
        for match in pattern.finditer(re.sub(r"\s", " ", flat)):
            at = line + text.count("\n", 0, match.start())
            if at not in waived:
                yield Finding(path, at, f"'{match[0]}'", plain)


def check_opening(path: str, node: ast.AST) -> Iterator[Finding]:
    """Yield a finding if the first sentence of a function's or class's docstring is a fragment."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return
    docstring = ast.get_docstring(node)
    if not docstring:
        return
    word = docstring.split()[0].strip(",.:;`'\"()").lower()
    is_property = any("property" in ast.unparse(each) for each in node.decorator_list)
    is_function = not isinstance(node, ast.ClassDef)
    is_noun = is_function and not is_property and word in NOUN
    is_section = is_function and docstring.split()[0].endswith(":")
    if word in FRAGMENT or is_noun or is_section:
        opening = " ".join(docstring.split()[:4])
        instead = "a verb first ('Return the ...', 'Raise ... if')" if is_function else "what it is"
        yield Finding(path, node.body[0].lineno, f"'{opening} ...' begins {node.name}", instead)


def check_python(path: str, source: str) -> Iterator[Finding]:
    """Yield the findings in docstrings, comments and messages of a Python file."""
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    comments = [token for token in tokens if token.type == tokenize.COMMENT]
    waived = frozenset(token.start[0] for token in comments if WAIVER.search(token.string))
    for token in comments:
        yield from check_text(path, token.start[0], token.string, waived)
    tree = ast.parse(source)
    for node in ast.walk(tree):
        yield from check_opening(path, node)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if len(node.value.split()) > 2:
                yield from check_text(path, node.lineno, node.value, waived)


def check_page(path: str, text: str) -> Iterator[Finding]:
    """Yield the findings in a page or another text, outside its blocks of code."""
    prose = re.sub(
        r"^```.*?^```", lambda block: re.sub(r"[^\n]", " ", block[0]), text, flags=re.M | re.S
    )
    lines = text.splitlines()
    waived = frozenset(number for number, line in enumerate(lines, 1) if WAIVER.search(line))
    yield from check_text(path, 1, prose, waived)


def check_tree(root: Path) -> list[Finding]:
    """Return the findings of all code and pages below a directory, in the order of their files."""
    found: list[Finding] = []
    for top in CODE:
        for file in sorted((root / top).rglob("*.py")):
            if (name := file.relative_to(root)) not in QUOTING:
                found += check_python(name.as_posix(), file.read_text())
    for page in PAGES:
        for file in [root / page] if page.endswith(".md") else sorted((root / page).rglob("*.md")):
            found += check_page(file.relative_to(root).as_posix(), file.read_text())
    for text in TEXTS:
        for file in sorted(root.glob(text)):
            found += check_page(file.relative_to(root).as_posix(), file.read_text())
    return found


def main() -> int:
    """Print the findings of the tree, or only those below the named paths."""
    named = tuple(sys.argv[1:])
    found = [each for each in check_tree(ROOT) if not named or each.path.startswith(named)]
    for each in found:
        print(each)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
