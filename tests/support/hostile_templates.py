"""Chat templates that a stranger could write to take a machine's time or memory."""

TRIGGER = "go off"
_NEST = "{% set ns = namespace(a=['x' * 9] * 9) %}{% for i in range(40) %}{% set ns.a = [ns.a] * 9"
_NEST += " %}{% endfor %}"
_LOOPS = "{% for a in range(9999) %}" * 9 + "{% endfor %}" * 9
_SAY = "{% set ns = namespace(a='ab') %}{% for i in range(40) %}"

OVER_TIME_OR_MEMORY = {
    # numbers
    "a huge power": "{{ 9 ** (9 ** 9) }}",
    "a huge power of data": "{{ (messages | length + 8) ** (9 ** 9) }}",
    "a huge shift by powers": "{{ 2 ** (10 ** 9) % (messages | length + 7) }}",
    "a huge product": "{% set ns = namespace(a=3) %}{% for i in range(99) %}"
    "{% set ns.a = ns.a * ns.a %}{% endfor %}{{ ns.a % 7 }}",
    # loops
    "nested loops": _LOOPS,
    "nested loops with text": _LOOPS.replace("{% endfor %}", "{{ a }}{% endfor %}", 1),
    "loops over the text": "".join(f"{{% for {c} in messages[0].content * 99 %}}" for c in "abcdef")
    + "{% endfor %}" * 6,
    "loops in macros": "{% macro m(n) %}{% for i in range(99) %}{% if n %}{{ m(n - 1) }}{% endif %}"
    "{% endfor %}{% endmacro %}{{ m(9) }}",
    "a macro that branches": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}"
    "{% endmacro %}{{ m(60) }}",
    "a loop that recurses": "{% for i in range(9) recursive %}"
    "{{ loop(range(9)) if loop.depth < 40 }}{% endfor %}",
    "a loop that cycles": _LOOPS.replace(
        "{% endfor %}", "{{ loop.cycle('a', 'b') }}{% endfor %}", 1
    ),
    "a loop without an end in a block": "{% set a %}" + _LOOPS + "{% endset %}",
    "a filter in nested loops": _LOOPS.replace("9999)", "9999) | map('string')"),
    # texts
    "a text doubled": _SAY + "{% set ns.a = ns.a + ns.a %}{% endfor %}{{ ns.a }}",
    "a text joined to itself": _SAY + "{% set ns.a = ns.a ~ ns.a %}{% endfor %}{{ ns.a }}",
    "a block doubled": "{% set a = 'ab' %}"
    + "{% set a %}{{ a }}{{ a }}{% endset %}" * 40
    + "{{ a }}",
    "a text multiplied": "{{ 'a' * 10 ** 10 }}",
    "a text multiplied by data": "{{ messages[0].content * 10 ** 10 }}",
    "a percent sign with a width": "{{ '%1000000000d' % 1 }}",
    "a format filter with a width": "{{ '%10000000000d' | format(1) }}",
    "a format filter of many": "{{ ('%1000000d' * 9999) | format(*range(9999)) }}",
    "a format method with a width": "{{ '{:10000000000}'.format(1) }}",
    "a format method with precision": "{{ '{:.2000000000f}'.format(1.5) }}",
    "center": "{{ 'a' | center(10 ** 10) }}",
    "a method that centers": "{{ 'a'.center(10 ** 10) }}",
    "ljust": "{{ 'a'.ljust(10 ** 10) }}",
    "zfill": "{{ 'a'.zfill(10 ** 10) }}",
    "tabs": "{{ '\t'.expandtabs(2 * 10 ** 9) }}",
    "indent": "{{ ('a\n' * 10 ** 6) | indent(10 ** 6) }}",
    "join": "{{ range(10 ** 5) | join('a' * 10 ** 6) }}",
    "a method that joins": "{{ ('a' * 10 ** 6).join(messages[0].content * 10 ** 5) }}",
    "replace": "{{ ('a' * 10 ** 6) | replace('a', 'b' * 10 ** 6) }}",
    "a method that replaces": "{{ ('a' * 10 ** 6).replace('', 'b' * 10 ** 6) }}",
    "translate": "{{ ('a' * 10 ** 7).translate({97: 'b' * 10 ** 6}) }}",
    "wordwrap": "{{ ('a' * 10 ** 7) | wordwrap(1, wrapstring='b' * 10 ** 5) }}",
    "truncate": "{{ ('a' * 10 ** 6) | truncate(9, end='b' * 10 ** 10) }}",
    "urlize": "{{ ('http://a.b/c ' * 10 ** 6) | urlize }}",
    "striptags": "{{ ('<' * 10 ** 6) | striptags }}",
    "json with an indent": "{{ [[1]] | tojson(indent=10 ** 10) }}",
    "json of nested lists": _NEST + "{{ ns.a | tojson }}",
    "json with separators": "{{ ([1] * 10 ** 6) | tojson(separators=('a' * 10 ** 6, ':')) }}",
    "a date with a long form": "{{ strftime_now('%c' * 10 ** 8) }}",
    # lists
    "a list doubled": "{% set ns = namespace(a=[1]) %}{% for i in range(60) %}"
    "{% set ns.a = ns.a + ns.a %}{% endfor %}{{ ns.a | length }}",
    "a list of a long range": "{{ range(10 ** 5) | list * 10 ** 5 }}",
    "batch": "{{ [1] | batch(10 ** 10, 'x') | list }}",
    "slice": "{{ [1] | slice(10 ** 10, 'x') | list }}",
    "nested lists as text": _NEST + "{{ ns.a }}",
    "nested lists compared": _NEST.replace("a=[", "b=['x' * 9], a=[")
    + "{% set a = ns.a %}"
    + _NEST
    + "{{ a == ns.a }}",
    "nested lists searched": _NEST + "{{ 'y' in ns.a | string }}",
    "nested lists printed": _NEST + "{{ ns.a | pprint }}",
    "a sum of lists": "{{ ([[1] * 10 ** 4] * 10 ** 5) | sum(start=[]) | length }}",
    "a dict of much": "{{ dict.fromkeys(range(10 ** 5) | list * 10 ** 5) }}",
    "lorem": "{{ lipsum(n=10 ** 7) }}",
}
# Ended by the interpreter itself, or too large only as a text.
OTHERS = {
    "a macro that calls itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a caller that calls itself": "{% macro m() %}{% call m() %}{{ caller() }}{% endcall %}"
    "{% endmacro %}{{ m() }}",
    "a long range": "{{ range(10 ** 9) | list }}",
    "a long text": "{{ 'a' * 2 ** 21 }}",
    "a long text by a loop": "{% for i in range(9999) %}{{ 'a' * 999 }}{% endfor %}",
    "an attribute of Python": "{{ messages.__class__.__mro__ }}",
    "an attribute behind a filter": "{{ messages | attr('__class__') }}",
    "a file": "{% include '/etc/passwd' %}",
    "an exception": "{{ raise_exception('x' * 10 ** 6) }}",
    "deep brackets": "{{ " + "[" * 500 + "]" * 500 + " }}",
    "deep blocks": "{% if 1 %}" * 400 + "{% endif %}" * 400,
}
# Where the processor is quick, or the limit generous.
MAY_END = {"striptags"}
NOT_JINJA = {
    "an open loop": ("first\n{% for m in messages %}\n{{ m.content }}", 3),
    "an unknown tag": ("first\n\n{% nothing %}", 3),
    "an unknown filter": ("first\n{{ messages | nothing }}", 2),
    "an open bracket": ("{{ messages[ }}", 1),
}


def once_triggered(template):
    """A template that is well unless a conversation says the trigger."""
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        f"{{% if '{TRIGGER}' in m.content %}}{template}{{% endif %}}{{% endfor %}}"
    )
