"""The program of the process that renders templates: code of strangers, apart and bounded.

It is started without the package, and holds nothing but Jinja. The kernel bounds it, since Python
cannot: one multiplication, one `center` or one comparison of nested lists may take all time or
memory without ever coming back to the interpreter.

A message from the parent is a length and marshalled values: the form of the template, its text, the
limits of one rendering, whether this is the parent's only request, the special tokens, and the
requests. Each request is answered by its status, the marked spans and the text. The forms are:

- CHAT: a conversation is rendered as transformers renders it.
- BLOCKS: values are filled in, and none may be missing; the spans are those of the blocks, in the
  order of their names. An empty request is answered by what the template uses, and its blocks.
"""

import json
import marshal
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from jinja2 import StrictUndefined, Template, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

RENDERED, FAILED, NOT_JINJA, TOO_LARGE, NO_MEMORY = range(5)
CHAT, BLOCKS = "chat", "blocks"
_Text: TypeAlias = tuple[str, Sequence[tuple[int, int]]]  # and its spans
LENGTH = struct.Struct("<Q")
ANSWER = struct.Struct("<BIQ")  # status, number of spans, bytes of text
SPAN = struct.Struct("<QQ")
READY = b"ready\n"
MIB = 1 << 20
# Of address space, beside the text: a parsed template of 30 KB takes some 10 MiB.
SPARE_MIB, TIMES_THE_TEXT = 128, 16
# Of a rendering among others: should it take longer, the parent asks again for it alone.
AMONG_OTHERS_SECONDS = 0.5
_MESSAGE_LENGTH = 200
_STATM = Path("/proc/self/statm")
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # names of one thing
_ANY_THOUGHT = frozenset(_THOUGHTS)
_END = "CONTINUE_FINAL_MESSAGE_TAG "  # a blank at its end shows whether blanks were stripped


class _TooLargeError(Exception):
    """The text is longer than it may be."""


def main() -> None:
    """Answers until the parent closes its end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they reach the whole group: the parent decides
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, also inside of C
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    _compiled("{{ 1 }}", CHAT)  # imports what Jinja imports late
    for kind in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(kind, (0, 0))
    source, target = sys.stdin.buffer, sys.stdout.buffer
    target.write(READY)
    target.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a crash is told by its signal
    while head := source.read(LENGTH.size):
        (length,) = LENGTH.unpack(head)
        form, template, seconds, most, is_alone, specials, requests = marshal.loads(
            source.read(length)
        )
        _bound_memory(most + max(map(len, requests)))
        for request in requests:
            signal.setitimer(
                signal.ITIMER_PROF, seconds if is_alone else min(seconds, AMONG_OTHERS_SECONDS)
            )
            try:
                answer = _answer(form, template, request, specials, most)
            except MemoryError:
                target.write(ANSWER.pack(NO_MEMORY, 0, 0))
                target.flush()
                os._exit(0)  # what is left of it would count against the next
            target.write(answer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        target.flush()


def _bound_memory(length: int) -> None:
    """Bounds the address space, where the system tells how much is used."""
    try:
        used = int(_STATM.read_text("ascii").split()[0]) * resource.getpagesize()
    except OSError:  # not Linux: only time and text are bounded
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = used + SPARE_MIB * MIB + TIMES_THE_TEXT * length
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _answer(
    form: str, template: str, request: bytes, specials: Mapping[str, Any], most: int
) -> bytes:
    try:
        compiled = _compiled(template, form)
    except TemplateSyntaxError as error:
        return _packed(NOT_JINJA, f"line {error.lineno}: {error.message}")
    except MemoryError:
        raise
    except Exception as error:  # too deep for Python, mostly
        return _packed(NOT_JINJA, _told(error))
    try:
        most += len(request)
        text, spans = _MADE[form](template, compiled, request, specials, most)
    except MemoryError:
        raise
    except _TooLargeError:
        return _packed(TOO_LARGE, "")
    except Exception as error:  # a template is user code, and may raise anything
        return _packed(FAILED, _told(error))
    if len(encoded := text.encode("utf-8", "surrogatepass")) > most:
        return _packed(TOO_LARGE, "")
    packed = b"".join(SPAN.pack(*span) for span in spans)
    return ANSWER.pack(RENDERED, len(spans), len(encoded)) + packed + encoded


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_MESSAGE_LENGTH]


def _packed(status: int, text: str) -> bytes:
    encoded = text.encode("utf-8", "surrogatepass")
    return ANSWER.pack(status, 0, len(encoded)) + encoded


def _text(
    template: str, compiled: Template, request: bytes, specials: Mapping[str, Any], most: int
) -> _Text:
    """The text of a conversation, and the spans that the template marks in it if they are asked."""
    if not request:
        return "", ()
    messages, tools, options, how = marshal.loads(request)
    messages = [*map(_with_thoughts, messages)]
    is_marked, continues = how.pop("is_marked", False), how.pop("continue_final_message", False)
    said = _leave_open(template, messages) if continues else ""
    variables = {"documents": None, "add_generation_prompt": False, **specials, **options, **how}
    pieces = _Pieces(most)
    marks: _Marks = compiled.environment.extensions[_Marks.identifier]  # type: ignore[assignment]
    marks.pieces = pieces if is_marked else None
    text = pieces.joined(compiled.generate(variables, messages=messages, tools=tools))
    return (_cut_off(text, said) if continues else text), pieces.marked


def _blocks(
    template: str, compiled: Template, request: bytes, specials: Mapping[str, Any], most: int
) -> _Text:
    """The text of a template, or that of its blocks, one after another, and their spans."""
    blocks = sorted(compiled.blocks.items())
    if not request:
        used = meta.find_undeclared_variables(compiled.environment.parse(template))
        return json.dumps({"uses": sorted(used), "blocks": [name for name, _ in blocks]}), ()
    values, pieces = {**specials, **marshal.loads(request)}, _Pieces(most)
    if not blocks:
        return pieces.joined(compiled.generate(values)), ()
    context = compiled.new_context(values)
    texts = [pieces.joined(block(context)) for _, block in blocks]
    ends = [*accumulate(map(len, texts))]
    return "".join(texts), [*pairwise([0, *ends])]


_MADE: dict[str, Callable[[str, Template, bytes, Mapping[str, Any], int], _Text]] = {
    CHAT: _text,
    BLOCKS: _blocks,
}


def _with_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose thoughts are found under the names that templates ask for."""
    if _ANY_THOUGHT.isdisjoint(message):
        return message
    found = next(message[name] for name in _THOUGHTS if name in message)
    return {"thinking": found, **message, "reasoning_content": found}


def _leave_open(template: str, messages: list[dict[str, Any]]) -> str:
    """Marks where the last message ends, which is returned as it was."""
    said: str = messages[-1]["content"]
    if "content" not in template:
        raise ValueError("the template does not name 'content', which is to be continued")
    messages[-1] = {**messages[-1], "content": said + _END}
    return said


def _cut_off(text: str, said: str) -> str:
    """The text up to where its last message ends."""
    end = text.rfind(_END.strip())
    if end < 0 or said.strip() not in text:
        raise ValueError("the template does not show the message that is to be continued")
    return text[:end] if text.startswith(_END, end) else text[:end].rstrip()


class _Pieces:
    """The pieces of a text while it is rendered, as many as there may be."""

    def __init__(self, most: int) -> None:
        self.length = 0
        self.marked: list[tuple[int, int]] = []
        self._most = most

    def joined(self, pieces: Iterator[str]) -> str:
        """The whole text."""
        kept, most = [], self._most
        for piece in pieces:
            self.length = length = self.length + len(piece)
            if length > most:
                raise _TooLargeError
            kept.append(piece)
        return "".join(kept)


class _Marks(Extension):
    """Takes down where {% generation %} begins and ends."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it
    pieces: _Pieces | None = None

    def parse(self, parser: Parser) -> nodes.Node:
        """A call of `_mark` with what the tag surrounds."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        said = str(caller())
        if self.pieces:
            start = self.pieces.length
            self.pieces.marked.append((start, start + len(said)))
        return said


@lru_cache(maxsize=4)
def _compiled(text: str, form: str) -> Template:
    return _of_blocks(text) if form == BLOCKS else _of_chat(text)


def _of_blocks(text: str) -> Template:
    return ImmutableSandboxedEnvironment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string(text)


def _of_chat(text: str) -> Template:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Marks, loopcontrols]
    )
    environment.filters["tojson"] = _as_json
    environment.globals.update(
        raise_exception=_raise, strftime_now=_now, dict=_Dict(), namespace=_Names
    )
    template = environment.from_string(text)
    template.globals = {**template.globals}  # of layers, which are slow to copy for each text
    return template


class _Environment(ImmutableSandboxedEnvironment):
    """The environment, in which the values of a message are found at once."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As ever: a key if the type has no attribute of that name, which a message's has not."""
        if type(obj) is dict and attribute in obj and attribute not in _OF_DICT:
            return obj[attribute]
        return super().getattr(obj, attribute)


_OF_DICT = frozenset(dir(dict))


def _as_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: Jinja's own filter writes it for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: Any) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


class _Dict:
    """`dict` of a template, without the attributes of a type."""

    fromkeys = staticmethod(dict.fromkeys)

    def __call__(self, *given: Any, **named: Any) -> dict[Any, Any]:
        return dict(*given, **named)


class _Names(Namespace):
    """`namespace` of a template, without names that mean something to Python."""

    def __init__(*given: Any, **named: Any) -> None:
        self, *rest = given
        values = dict(*rest, **named)
        for name in values:
            _require_plain(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_plain(name)
        super().__setitem__(name, value)


def _require_plain(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no name that begins with an underscore: {name!r}")


if __name__ == "__main__":
    main()
