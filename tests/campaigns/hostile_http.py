"""Answers as no server should send them: other bytes around the same JSON, or none at all."""

import gzip
import itertools
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from campaigns.hostile_answers import KEY, error, written

STATUSES = (
    *(b"HTTP/1.1 abc OK", b"HTTP/9.9 200 OK", b"ICY 200 OK", b"200 OK", b"HTTP/1.1 99999 x", b""),
    *(b"HTTP/1.1 -1 x", b"HTTP/1.1 200 \x1b[31m\x00", b"HTTP/1.0 200", b"HTTP/1.1 0 x"),
    *(b"HTTP/1.1 \xef\xbc\x9200 OK", b"HTTP/1.1  200 OK", b"\r\n" * 9 + b"HTTP/1.1 200 OK"),
    *(KEY.encode(), b"PRI * HTTP/2.0", b"HTTP/1.1 200 " + b"x" * 90_000),
)
WAITS = (
    *("1", "-1", "nan", "inf", "1e999", "x", "\u0663", "9" * 400, "", KEY),
    *("Mon, 99 Foo 99999 99:99:99 x", "Fri, 31 Dec 9999 23:59:59 GMT", "1 Jan 1 0:0:0 +99999999"),
)
PLACES = (
    *("file:///etc/passwd", "/v1/chat/completions", "//[", "http://[::1", "", "?", "http://a b/"),
    *("https://x:99999999/", "gopher://x", "http://\u00ad/", "http://xn--a/", "http:///x"),
    *(f"http://{KEY}@127.0.0.1/", f"http://127.0.0.1:1/?key={KEY}", "\x1b[31m", "x" * 60_000),
    *("javascript:alert(1)", "http://" + "a" * 300 + "/"),
)
LINES = (
    *(b"X: \x1b[31m\x00", b"X\x00: y", b"X y: z", b": y", b"X", b" folded", b"X: a\r\n b", b"X:"),
    *(b"X: \xff\xfe", b"X: a\nY: b", b"X: \xc3\xa9", b"X: y\r", b"Date: x", b"Trailer: x"),
    *(b"Connection: upgrade", b"Upgrade: h2c", b"Set-Cookie: " + KEY.encode()),
    *(b"Set-Cookie: a=b; expires=" + b" " * 50_000 + b"x", b"Set-Cookie: a=" + b"1-" * 30_000),
    b"Set-Cookie: a=b; expires=Mon, 01 Jan 99999 99:99:99 GMT; version=x",
    *(b"Set-Cookie: a=b; max-age=" + b"9" * 5000, b"X: " + b"x" * 99_000),
    b"\r\n".join([b"X: y"] * 9000),
)


@dataclass(frozen=True)
class Wire:
    """What is written for one answer."""

    what: str
    pieces: Iterable[bytes]
    body: bytes | None  # what a client may read of it; None: nothing at all
    is_plain: bool  # then it has to


def plain(body):
    """An answer as it should be sent."""
    return Wire("plain", [_head(body), body], body, is_plain=True)


def wire(draw, body, elsewhere):
    """Other bytes than those of a plain answer with this body."""
    how = draw.choice([*_WIRES])
    found = _WIRES[how](draw, body, elsewhere)
    return found if isinstance(found, Wire) else Wire(how, found, body, is_plain=False)


def _head(body, *lines, status=b"HTTP/1.1 200 OK"):
    given = (b"Content-Type: application/json", b"Content-Length: %d" % len(body))
    return b"\r\n".join((status, *(lines or given), b"", b""))


def _endless(piece):
    while True:
        yield piece
        time.sleep(0.002)  # many of these wait for their deadline at once


def _with_status(draw, body, _):
    return [_head(body, status=draw.choice(STATUSES)), body]


def _with_code(draw, _body, _):
    code = draw.choice((*range(400, 430), 451, 500, 502, 503, 599, 600, 999, 201, 204, 206, 100))
    body = written(error(draw)) if draw.random() < 0.8 else draw.choice((b"", b"<html>\xff", b"["))
    lines = (b"Content-Length: %d" % len(body), b"Retry-After: " + draw.choice(WAITS).encode())
    return Wire(
        f"code {code}", [_head(body, *lines, status=b"HTTP/1.1 %d x" % code), body], None, False
    )


def _with_length(draw, body, _):
    size = len(body)
    told = draw.choice(
        [
            *(draw.randrange(size), size + 1, size + 10**6, -1, -size, 10**30, 0, 2**63, "", KEY),
            *(f"0x{size:x}", f"+{size}", f"{size}, {size}", f"{size}, {size + 1}", f"{size}.0"),
            *(f"{size}\r\nContent-Length: {size}", f"{size}\r\nContent-Length: {size - 1}"),
        ]
    )
    return [_head(body, f"Content-Length: {told}".encode()), body]


def _with_chunks(draw, body, _):
    at = sorted(draw.choices(range(1, len(body)), k=draw.randrange(1, 5)))
    parts = [body[a:b] for a, b in zip([0, *at], [*at, len(body)], strict=True) if b > a]
    head = _head(body, b"Transfer-Encoding: chunked")
    chunks = [b"%x\r\n%s\r\n" % (len(part), part) for part in parts]
    whole = b"".join(chunks) + b"0\r\n\r\n"
    match draw.randrange(9):
        case 0:
            return Wire("whole chunks", [head, whole], body, is_plain=True)
        case 1:
            size = draw.choice(
                (b"zz", b"-5", b"F" * 16, b"F" * 30, b"", b" 5", b"5;" + b"x" * 10**6)
            )
            return [head, size + b"\r\n" + body + b"\r\n0\r\n\r\n"]
        case 2:
            return [head, b"".join(chunks)]
        case 3:
            return itertools.chain((head,), chunks, _endless(b"1\r\n \r\n" * 4096))
        case 4:
            return itertools.chain((head, b"5;"), _endless(b"x" * 4096))
        case 5:
            more = _endless(b"X: y\r\n" * 999)
            return itertools.chain((head, b"".join(chunks), b"0\r\n"), more)
        case 6:
            both = b"Content-Length: %d" % draw.choice((len(body), 1))
            return [_head(body, b"Transfer-Encoding: chunked", both), whole]
        case 7:
            name = draw.choice((b"gzip, chunked", b"identity", b"xchunked", b"chunked, chunked"))
            return [_head(body, b"Transfer-Encoding: " + name), whole]
    cut = draw.randrange(len(whole))
    return [head, whole[:cut]]


def _with_encoding(draw, body, _):
    name = draw.choice((b"gzip", b"GZIP", b"x-gzip", b"deflate", b"br", b"zstd", b"gzip, gzip"))
    name = draw.choice((name, name, KEY.encode(), b"identity", b"\x1b[31m", b"x" * 9000))
    packed = draw.choice((gzip.compress(body), zlib.compress(body), _bomb(), body))
    told = (b"Content-Length: %d" % len(packed), b"Content-Encoding: " + name)
    return Wire("encoding", [_head(body, *told), packed], body if packed == body else None, False)


def _bomb():
    """A megabyte that becomes a gigabyte."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    return packer.compress(bytes(1 << 20)) + packer.compress(bytes(1 << 20)) * 1023


def _redirect(draw, body, elsewhere):
    code = draw.choice((300, 301, 302, 303, 304, 305, 307, 308, 399))
    there = draw.choice([*PLACES, f"{elsewhere}/v1/x", f"{elsewhere}/{KEY}"])
    lines = (b"Content-Length: %d" % len(body), f"Location: {there}".encode())
    return Wire(
        f"redirect {code}", [_head(body, *lines, status=b"HTTP/1.1 %d x" % code), body], None, False
    )


def _informational(draw, body, _):
    code = draw.choice((b"100", b"102", b"103", b"199", b"101"))
    first = b"HTTP/1.1 %s x\r\n%s\r\n" % (code, draw.choice((b"", b"Link: </x>\r\n")))
    if draw.random() < 0.3:
        return _endless(first * 99)
    return [first * draw.choice((1, 3, 2000)), _head(body), body]


def _endless_head(draw, _body, _):
    begun = b"HTTP/1.1 200 OK\r\n"
    return itertools.chain(
        (begun + draw.choice((b"X: ", b"")),),
        _endless(draw.choice((b"x" * 4096, b"X: y\r\n" * 999, b"\r\n ", b"\0"))),
    )


def _with_head(draw, body, _):
    line = draw.choice(LINES)
    return [_head(body, b"Content-Length: %d" % len(body), line), body]


def _cut(draw, body, _):
    whole = _head(body) + body
    return Wire("cut", [whole[: draw.randrange(len(whole))]], None, is_plain=False)


def _slow(draw, body, _):
    whole = _head(body) + body
    at, size = draw.randrange(len(whole)), draw.choice((1, 20, len(whole)))

    def pieces():
        yield whole[:at]
        for start in range(at, len(whole), size):
            time.sleep(0.02)
            yield whole[start : start + size]

    return pieces()


def _flipped(draw, body, _):
    head = bytearray(_head(body))
    for _ in range(draw.choice((1, 1, 3))):
        head[draw.randrange(len(head))] ^= 1 << draw.randrange(8)
    return [bytes(head), body]


def _endless_body(draw, body, _):
    # With a head that states no length, the body goes on for as long as the connection does.
    fill = draw.choice((b" ", b"x", b"[", b"\0", b"[],")) * 4096
    first = draw.choice((body, b"", b'{"x": ['))
    whole = itertools.chain((_head(b"", b"X: y"), first), _endless(fill * 16))
    return Wire("endless body", whole, None, is_plain=False)


def _spaced(draw, body, _):
    """A large answer, of which nothing is wrong."""
    body += b" " * draw.choice((1000, 10**6, 3 * 10**6))
    return Wire("spaced", [_head(body), body], body, is_plain=True)


def _answered_twice(draw, body, _):
    """What comes after an answer is not that of the next request."""
    other = draw.choice((body.replace(b"answer", b"ANOTHER"), body, b"{}"))
    more = draw.choice((_head(other) + other, b"HTTP/1.1 200 OK\r\n", b"\0", b"x" * 1000))
    pieces = ([_head(body) + body, more, b""], [_head(body) + body + more, b""])
    return Wire("answered twice", draw.choice(pieces), body, is_plain=False)


_WIRES: dict[str, Callable] = {
    "status": _with_status,
    "code": _with_code,
    "length": _with_length,
    "chunks": _with_chunks,
    "encoding": _with_encoding,
    "redirect": _redirect,
    "informational": _informational,
    "endless head": _endless_head,
    "head": _with_head,
    "cut": _cut,
    "slow": _slow,
    "flipped": _flipped,
    "endless body": _endless_body,
    "spaced": _spaced,
    "answered twice": _answered_twice,
}
