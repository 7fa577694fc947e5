#!/usr/bin/env python3
"""Writes golden/chat.json: templates in the manner of those that models carry, conversations, and what jinja2 makes
of them in the environment in which transformers renders. Needs jinja2 and transformers.

    python3 tests/formats/make_chat_golden.py > tests/formats/golden/chat.json
"""
import json
import sys

from transformers.utils.chat_template_utils import _compile_jinja_template

TEMPLATES = {}

# Tools in the system turn, calls as JSON, thoughts of past turns dropped: found by walking backwards.
TEMPLATES["thinking"] = r"""
{%- set turn = namespace(last_query=messages|length - 1, searching=true) %}
{%- for m in messages[::-1] %}
    {%- set i = (messages|length - 1) - loop.index0 %}
    {%- if turn.searching and m.role == "user" and m.content is string and not (m.content.startswith('<result>') and m.content.endswith('</result>')) %}
        {%- set turn.searching = false %}
        {%- set turn.last_query = i %}
    {%- endif %}
{%- endfor %}
{%- if tools %}
    {{- '<|begin|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n\n' }}
    {%- endif %}
    {{- "You may call these functions:\n<functions>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</functions>\nAnswer a call as {\"name\": <name>, \"arguments\": <object>}<|end|>\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|begin|>system\n' + messages[0].content + '<|end|>\n' }}
    {%- endif %}
{%- endif %}
{%- for m in messages %}
    {%- set content = m.content if m.content is string else '' %}
    {%- if (m.role == "user") or (m.role == "system" and not loop.first) %}
        {{- '<|begin|>' + m.role + '\n' + content + '<|end|>' + '\n' }}
    {%- elif m.role == "assistant" %}
        {%- set thought = '' %}
        {%- if m.reasoning_content is string %}
            {%- set thought = m.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > turn.last_query and (loop.last or (not loop.last and thought)) %}
            {{- '<|begin|>' + m.role + '\n<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- '<|begin|>' + m.role + '\n' + content }}
        {%- endif %}
        {%- if m.tool_calls %}
            {%- for call in m.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\n' }}
                {%- endif %}
                {%- if call.function %}{%- set call = call.function %}{%- endif %}
                {{- '<call>\n{"name": "' }}
                {{- call.name }}
                {{- '", "arguments": ' }}
                {%- if call.arguments is string %}
                    {{- call.arguments }}
                {%- else %}
                    {{- call.arguments | tojson }}
                {%- endif %}
                {{- '}\n</call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|end|>\n' }}
    {%- elif m.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|begin|>user' }}
        {%- endif %}
        {{- '\n<result>\n' ~ content ~ '\n</result>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|begin|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""

# Macros, parts of contents, schemas and calls as markup, previtem and nextitem, errors that the template raises.
TEMPLATES["markup"] = r"""
{%- macro extras(schema, known) %}
    {%- if schema is mapping %}
        {%- for key, value in schema|items if key not in known %}
            {%- if value is mapping or (value is sequence and value is not string) %}
                {{- '\n<' ~ key ~ '>' ~ (value | tojson | safe) ~ '</' ~ key ~ '>' }}
            {%- else %}
                {{- '\n<' ~ key ~ '>' ~ (value | string) ~ '</' ~ key ~ '>' }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- macro parts(content, counts=false) %}
    {%- if content is string %}
        {{- content }}
    {%- elif content is iterable and content is not mapping %}
        {%- for part in content %}
            {%- if part.type == 'image' or 'image' in part %}
                {%- set seen.images = seen.images + 1 %}
                {%- if counts %}{{ 'Image ' ~ seen.images ~ ': ' }}{% endif -%}
                {{- '<|image|>' }}
            {%- elif 'text' in part %}
                {{- part.text }}
            {%- elif part.type != 'stop' %}
                {{- raise_exception('Part of unknown type ' ~ part.type) }}
            {%- endif %}
        {%- endfor %}
    {%- elif content is none or content is undefined %}
        {{- '' }}
    {%- else %}
        {{- raise_exception('Content of unexpected type') }}
    {%- endif %}
{%- endmacro %}
{%- set seen = namespace(images=0) %}
{%- if not messages %}{{- raise_exception('No messages') }}{%- endif %}
{%- set has_system = messages[0].role in ['system', 'developer'] %}
{%- if tools and tools is iterable and tools is not mapping %}
    {{- '<|begin|>system\n# Functions\n<functions>' }}
    {%- for tool in tools %}
        {%- set f = tool.function if tool.function is defined else tool %}
        {{- '\n<function>\n<name>' ~ f.name ~ '</name>' }}
        {%- if f.description is defined %}{{- '\n<description>' ~ (f.description | trim) ~ '</description>' }}{%- endif %}
        {%- if f.parameters is defined and f.parameters.properties is defined %}
            {%- for pname, p in f.parameters.properties.items() %}
                {{- '\n<parameter>\n<name>' ~ pname ~ '</name>\n<type>' ~ p.type ~ '</type>' }}
                {{- extras(p, ['name', 'type', 'description']) }}
                {{- '\n</parameter>' }}
            {%- endfor %}
        {%- endif %}
        {{- extras(f.parameters, ['type', 'properties']) }}
        {{- '\n</function>' }}
    {%- endfor %}
    {{- '\n</functions>' }}
    {%- if has_system %}{{- '\n\n' ~ parts(messages[0].content)|trim }}{%- endif %}
    {{- '<|end|>\n' }}
{%- elif has_system %}
    {{- '<|begin|>system\n' + parts(messages[0].content)|trim + '<|end|>\n' }}
{%- endif %}
{%- for m in (messages[1:] if has_system else messages) %}
    {%- if m.role == 'assistant' and m.tool_calls is defined and m.tool_calls is iterable and m.tool_calls | length > 0 %}
        {%- generation %}
        {{- '<|begin|>assistant\n' + parts(m.content)|trim }}
        {%- for call in m.tool_calls %}
            {%- set f = call.function or call %}
            {{- '\n<call>\n<function=' ~ f.name ~ '>' }}
            {%- for key, value in f.arguments|items %}
                {%- set value = value | tojson if value is mapping or (value is sequence and value is not string) else value | string %}
                {{- '\n<parameter=' + key + '>\n' + value + '\n</parameter>' }}
            {%- endfor %}
            {{- '\n</function>\n</call>' }}
        {%- endfor %}
        {{- '<|end|>\n' }}
        {%- endgeneration %}
    {%- elif m.role == 'tool' %}
        {%- if loop.previtem and loop.previtem.role != 'tool' %}{{- '<|begin|>user' }}{%- endif %}
        {{- '\n<result>\n' }}{{- parts(m.content) }}{{- '\n</result>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|end|>\n' }}{%- endif %}
    {%- elif m.role in ('user', 'assistant') %}
        {{- '<|begin|>' + m.role + '\n' + parts(m.content, counts=true)|trim + '<|end|>\n' }}
    {%- else %}
        {{- raise_exception('Unexpected role ' ~ m.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|begin|>assistant\n' }}{{- '<think>\n' if enable_thinking | default(true) else '<think>\n\n</think>\n\n' }}{%- endif %}
"""

# Headers, a date, tools with indentation, bos and eos, `set` without and with an outer value.
TEMPLATES["headers"] = r"""{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}

{#- The system message is taken out, so that it can be put where it belongs. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|h|>system<|/h|>\n\n" }}
{%- if tools is not none %}
    {{- "Environment: functions\n" }}
{%- endif %}
{{- "Today: " + date_string + "\n\n" }}
{{- system_message }}
{{- eos_token }}
{%- if tools is not none %}
    {%- if messages | length != 0 %}
        {%- set first = messages[0]['content']|trim %}
        {%- set messages = messages[1:] %}
    {%- else %}
        {{- raise_exception("Functions need a first user message!") }}
    {%- endif %}
    {{- '<|h|>user<|/h|>\n\nFunctions:\n\n' -}}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
    {{- first + eos_token}}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or message.role == 'ipython' or 'tool_calls' in message) %}
        {{- '<|h|>' + message['role'] + '<|/h|>\n\n'+ message['content'] | trim + eos_token }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("One call at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|h|>assistant<|/h|>\n\n' -}}
        {{- '{"name": "' + call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- call.arguments | tojson }}
        {{- "}" }}
        {{- eos_token }}
    {%- else %}
        {{- "<|h|>ipython<|/h|>\n\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|h|>assistant<|/h|>\n\n' }}
{%- endif %}
"""

# White space by trim_blocks and lstrip_blocks alone; alternation is checked; the system text goes to the last user turn.
TEMPLATES["instruct"] = """{% set ns = namespace(n=0) %}
{% set loop_messages = messages %}
{% if messages[0]['role'] == 'system' %}
    {% set loop_messages = messages[1:] %}
    {% set system_message = messages[0]['content'] %}
{% endif %}
{%- set users = loop_messages | selectattr("role", "equalto", "user") | list %}
{{ bos_token }}
{% for message in loop_messages %}
  {% if message['role'] in ('tool', 'tool_results') or message.tool_calls %}{% continue %}{% endif %}
  {% if (message['role'] == 'user') != (ns.n % 2 == 0) %}
    {{ raise_exception('Roles must alternate user/assistant/user/assistant/...') }}
  {% endif %}
  {% set ns.n = ns.n + 1 %}
  {% if message['role'] == 'user' %}
[INST] {% if message == users[-1] and system_message is defined %}{{ system_message + '\\n\\n' }}{% endif %}
{{ message['content'] }}[/INST]
  {%- elif message['role'] == 'assistant' %}
 {{ message['content']|trim }}{{ eos_token -}}
  {% endif %}
{% endfor %}
{# nothing is left #}

"""

# Other names for roles, block set, loop.index0 arithmetic, nested loops with else and break.
TEMPLATES["roles"] = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set prefix = messages[0]['content'] + '\n\n' -%}
    {%- else -%}
        {%- set prefix = messages[0]['content'][0]['text'] + '\n\n' -%}
    {%- endif -%}
    {%- set rest = messages[1:] -%}
{%- else -%}
    {%- set prefix = "" -%}
    {%- set rest = messages -%}
{%- endif -%}
{%- for message in rest -%}
    {%- if message['role'] == 'assistant' -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] | upper | replace("USER", "user") | lower -%}
    {%- endif -%}
    {%- set body | trim %}
      {% if message['content'] is string %}
{{ message['content'] }}
      {% else %}
        {% for item in message['content'] or [] %}
          {% if item['type'] == 'stop' %}{% break %}{% endif %}
          {{ item['text'] | default('<' ~ item.type ~ '>', true) | trim }}
        {% else %}
(nothing)
        {% endfor %}
      {% endif %}
    {% endset -%}
    {{ '<turn ' + role + '>\n' + (prefix if loop.first else "") }}{{ body }}{{ '</turn ' ~ loop.index ~ '/' ~ loop.length ~ '>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<turn model>\n'}}
{%- endif -%}
"""

weather = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "  The weather at a place & time. ",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "A town", "enum": ["Zürich", "東京"]},
                "days": {"type": "integer", "minimum": 1, "default": 3, "exact": True},
                "units": {"type": ["string", "null"], "default": None},
            },
            "required": ["place"],
        },
    },
}
clock = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}


def call(name, **arguments):
    return {"type": "function", "id": "c1", "function": {"name": name, "arguments": arguments}}


def say(role, content, **more):
    return {"role": role, "content": content, **more}


CONVERSATIONS = {
    "one": [say("user", "Hello there.")],
    "system": [say("system", "  Be brief.\n"), say("user", "Hi"), say("assistant", "\nHello! "), say("user", "Bye\n")],
    "thought": [
        say("user", "2+2?"),
        say("assistant", "<think>\nTwo and two.\n</think>\n\n4"),
        say("user", "And 3?"),
        say("assistant", "<think>\nplus <three>\n\n</think>\n\n7", reasoning_content=None),
    ],
    "reasoning": [say("user", "why"), say("assistant", "because", reasoning_content="\nlet me see\n")],
    "calls": [
        say("system", "Help."),
        say("user", "Weather?"),
        say("assistant", "I look.", tool_calls=[call("weather", place="Zürich", days=2, deep={"a": [1, 2.5, None]})]),
        say("tool", '{"t": 21.5}'),
        say("assistant", "21.5 °C"),
        say("user", "Thanks"),
    ],
    "many": [
        say("user", "Both!"),
        say("assistant", "", tool_calls=[call("weather", place="東京"), call("clock")]),
        say("tool", "sun"),
        say("tool", "12:00 \"sharp\""),
        say("assistant", None),
    ],
    "unicode": [say("system", "日本語 «é»"), say("user", "e\u0301 🙂 \u00a0 \u2028 \t'q' \"d\" \\ </s> &amp;")],
    "parts": [
        say("user", [{"type": "text", "text": " a "}, {"type": "image"}, {"type": "text", "text": "b"}, {"type": "stop"}]),
        say("assistant", "c"),
        say("user", []),
    ],
    "roles": [say("user", "a"), say("user", "b"), say("critic", "c")],
    "none": [],
}

OPTIONS = [
    {},
    {"add_generation_prompt": True},
    {"add_generation_prompt": True, "enable_thinking": False, "date_string": "1 May 2031"},
    {"tools": [weather, clock], "add_generation_prompt": True},
]

# Which conversations are rendered with which options: those that differ by them.
RUNS = [set(CONVERSATIONS), {"one", "reasoning"}, {"one"}, {"system", "calls", "many", "none"}]

X = {
    "s": "Hello, Wörld", "e": "", "n": 7, "f": 2.5, "t": True, "z": None, "l": [3, 1, 2], "w": ["b", "A", "a", "B"],
    "d": {"b": 1, "a": {"c": [1, "x"]}, "items": 5}, "m": [{"k": "x", "v": 1}, {"k": "y", "v": 0}, {"k": "x"}],
    "text": "one\ntwo\n\n  three", "p": "  pad\t\n",
}

# Each is put between {{ and }}; a beginning with { is a whole template.
EXPRESSIONS = r"""
1 + 2 * 3 - 4
(1 + 2) * 3
7 // 2, -7 // 2, 7 % 3, -7 % 3, 7 % -3
7 / 2, 6 / 2
7.5 // 2, -7.5 % 2
1.0, 0.1, 1e16, 1e-5, 123456.789, 1e15, 2.50
-n, +n, - f, -n|abs
'a' ~ 1 ~ 2.0 ~ none ~ true ~ [1, 'q']
1 + 2 ~ 3 + 4
'ab' * 3
'a' 'b' "c"
"q\"q" ~ 'q\'q' ~ '\n\t\\' ~ '\x41\u00e9\U0001F642'
'a\qb'
[1, 'a', none, true, 1.5, (), (1,), (1, 2), {}]
{'a': 1, "b": [1, {'c': none}]}
['it\'s', 'say "x"', 'b\'o"th', 'tab\t', 'é\u00a0\x7f']
1 < 2, 2 <= 2, 3 > 4, 'a' < 'b', 1 == 1.0, 1 == true, 'a' == 1, [1] == [1], (1,) == [1]
1 < n < 10, 1 < n < 5
2 in l, 9 in l, 'ell' in s, 'b' in d, 5 not in l, 'x' in nothing
not 1 == 2
true and 'x', false or 0, none or 'y', 1 and 0
'x' if n > 5 else 'y', ('x' if n > 50), 'a' if false else 'b' if true else 'c'
n is defined, nothing is defined, nothing is undefined, n is not none, z is none, z is not defined
s is string, l is sequence, s is sequence, d is mapping, d is iterable, n is iterable, n is number, f is number, t is number
n is integer, t is integer, f is float, t is boolean, t is true, t is false, n is odd, n is even, n is divisibleby 7
n is equalto 7, n is eq(8), n is gt 3, n is in [7], s is lower, 'abc' is lower, nothing is sequence, nothing is iterable
n is equalto 7 and s is string or false
not n is defined
s[0], s[-1], s[7:], s[:5], s[::-1], s[-5:-1], s[8], l[1], l[-1], l[::2], l[::-1], l[5:], l[-2:]
l[1:][0], 'é'[0:1]
d.b, d['b'], d.a.c[1], d['a']['c'][0], d.missing, d.get('b'), d.get('q'), d.get('q', 3)
d['items'], d.items()|list
l.0, m.0.k
m|map(attribute='k')|join(','), m|map(attribute='v', default=9)|list, w|map('upper')|join
m|selectattr('v')|list, m|selectattr('k', 'equalto', 'x')|list|length, m|rejectattr('k', '==', 'x')|map(attribute='k')|list
m|selectattr('v', 'defined')|list|length, l|select('odd')|list, l|reject('gt', 1)|list
l|sort, l|sort(reverse=true), w|sort, w|sort(case_sensitive=true), m[:2]|sort(attribute='v')|map(attribute='v')|list
w|unique|list, l|first, l|last, s|first, s|last, []|first, l|length, s|length, d|length, nothing|length
l|join, l|join(', '), m|join('-', attribute='k'), 'abc'|join('.')
s|upper, s|lower, s|title, s|capitalize, 'a-b c(d'|title, 'hello WORLD'|capitalize
p|trim ~ '|', 'xxaxx'|trim('x'), p.strip() ~ '|', p.lstrip() ~ '|', p.rstrip() ~ '|', 'xyaxy'.strip('yx')
'\u3000\u00a0x\u2028 '|trim ~ '|', '\u3000a\u00a0b\x1f'.split(), '\u200bx'.strip()
s|replace('l', 'L'), s|replace('l', 'L', 1), s.replace('l', ''), s.replace('l', 'L', 2)
nothing|default('x'), none|default('x'), e|default('x', true), e|default('x'), nothing|d
'12'|int, ' 12 '|int, 'x'|int, 'x'|int(5), 3.9|int, '3.9'|int, '2.5'|float, 'x'|float, 7|float, true|int
7|string ~ 'a', l|string, none|string, true|string
d|items|list, d|dictsort, {'B': 2, 'a': 1}|dictsort, {'x': 2, 'y': 1}|dictsort(by='value')
l|reverse|list, s|reverse, [l|max, l|min, -5|abs]
text|indent, text|indent(2, true), text|indent(width=3, blank=true), text|indent('>')
d|tojson, d|tojson(indent=2), [] | tojson(indent=2), {'k': [], 'o': {}}|tojson(indent=1)
{'b': 1, 'a': "é<>&'\"\n\u2028\x01\x7f"}|tojson, 'é🙂'|tojson(ensure_ascii=true), {'b': 1, 'a': 2}|tojson(sort_keys=true)
[1.0, 1e20, 1e-7, 0.1, -0.0, true, none]|tojson(separators=(',', ':'))
s.split(', '), 'a b  c '.split(), 'a,b,c'.split(',', 1), 'a,b,c'.rsplit(',', 1), ''.split(','), ''.split(), ' a b c'.split(none, 1)
s.startswith('He'), s.endswith(('x', 'd')), s.find('W'), s.find('zz'), s.rfind('l'), s.count('l'), 'Ö'.lower(), s.upper()
"they're ok".title(), 'x'.join(['a', 'b']), 'a\nb\r\nc'.splitlines(), 'prefix'.removeprefix('pre'), ' '.isspace(), '12'.isdigit()
d.keys()|list, d.values()|list, d.items is defined
range(3)|list, range(1, 7, 2)|list, range(3, 0, -1)|list, dict(a=1, b='x'), dict({'q': 1}, r=2)
namespace(a=1).a, (s|safe) ~ '', 1_000, {'a': {'b': 1}}.a.b
nothing, nothing|trim, nothing|upper, nothing|list, nothing == nothing, nothing == none
nothing.x
nothing + 1
nothing()
1 + 'a'
none + 'a'
s - 1
n.x, n.x is defined, z.x, z['x']
none|length
l|tojson|fromjson
nothing|tojson
for
1 // 0
raise_exception('stop here')
{% for i in range(5) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }},{% endfor %}
{% for a, b in [(1, 2), [3, 4]] %}{{ a }}-{{ b }}{{ ';' if not loop.last }}{% endfor %}
{% for (k, v) in {'x': 1}.items() %}{{ k }}{{ v }}{% endfor %}
{% for c in 'héy' %}{{ c }}.{% endfor %}{% for k in d %}{{ k }} {% endfor %}{% for x in nothing %}x{% else %}none{% endfor %}
{% for x in l if x > 1 %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ x }} {% else %}no{% endfor %}
{% for x in l %}{{ loop.previtem }}<{{ x }}>{{ loop.nextitem if loop.nextitem is defined else 'end' }} {% endfor %}
{% set x = 1 %}{% for i in l %}{% set x = x + i %}{{ x }} {% endfor %}{{ x }}
{% for i in l %}{{ i }}{% endfor %}[{{ i }}]
{% set x = 1 %}{% if true %}{% set x = 2 %}{% endif %}{{ x }}
{% set a, b = 1, [2] %}{{ a }}{{ b }}{% set t = 1, %}{{ t }}
{% set ns = namespace(c=0, l=[]) %}{% for i in l %}{% set ns.c = ns.c + i %}{% set ns.l = ns.l + [i] %}{% endfor %}{{ ns.c }}{{ ns.l }}
{% set x %}  a{{ n }} {% endset %}[{{ x }}]{% set y | trim | upper %} b {% endset %}[{{ y }}]
{% macro f(a, b='x', c=none) %}{{ a }}|{{ b }}|{{ c }}{% if a is undefined %}u{% endif %};{% endmacro %}{{ f(1) }}{{ f(1, 2) }}{{ f(b=3, a=2) }}{{ f() }}{{ f(1, c=4)|upper }}
{% macro g(k) %}{% if k > 0 %}{{ k }}{{ g(k - 1) }}{% endif %}{% endmacro %}{{ g(4) }}
{% macro h(a) %}{{ a }}{% endmacro %}{{ h(1, 2) }}
{% set q = 'outer' %}{% macro h() %}{{ q }}{{ n }}{% endmacro %}{% set q = 'later' %}{{ h() }}
{% if n > 10 %}a{% elif n > 5 %}b{% else %}c{% endif %}{% if z %}{% elif e %}{% else %}d{% endif %}
{{ 1 }}  {%- if true %}  x  {%- endif -%}  y {#- c -#} z {{- 2 -}} w
  {% if true %}  {# c #}    {% endif %} x
{%+ if true %} a {% endif +%} b
{{ '}}' }}{{ "{%" }}{{ {'a': {'b': 2}}['a'] }}{{ '#}' }}
{%- set x = [1, 2] -%} {{- x -}}
{{ 'é' }}{{ '%' }}{ {a} {b %}
{% generation %}{{ n }}{% endgeneration %}
{% if %}{% endif %}
{% for x in l %}
{% endif %}
{{ 1
{{ (1 }}
{% unknown %}
{# open
{{ 'open }}
{{ 1 2 }}
{% set ns = d %}{% set ns.x = 1 %}
{% break %}
{{ l.append(1) }}
{{ range(200000)|list|length }}
""".strip("\n").split("\n")

# What jinja2 can do and we say that we cannot; and templates over several lines.
EXPRESSIONS += [
    "{% if true %}\n  a\n{% endif %}\n  {% set x = 1 %}\n  b {% if x %}\n c\n{%- endif %}\n\n{{ x }}\n",
    "a\r\nb\rc\n\n",
    "{% for i in l %}\n    {{ i }}\n    {# note #}\n{% endfor %}\ntail {% if t %}  \n{% endif %}",
    "\n\n{{ n }}\n\n",
    "{{ n }}\n",
    "  {{ n }} {%- if t %}\n\n y{% endif %}\n",
    "{#- a -#}\n\n x {#+ b #}\n  {# c +#}\n y",
    "{{\n  'a'\n  ~\n  'b'\n}}",
]


def render(template, **variables):
    try:
        return _compile_jinja_template(template).render(**variables)
    except Exception:  # whatever is wrong: ours must refuse it too
        return None


def main():
    cases = []
    for template, text in TEMPLATES.items():
        for name, messages in CONVERSATIONS.items():
            for i, options in enumerate(OPTIONS):
                if name not in RUNS[i]:
                    continue
                variables = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": False,
                             "bos_token": "<s>", "eos_token": "</s>", **options}
                cases.append([template, name, i, render(text, **variables)])
    expressions = []
    for e in EXPRESSIONS:
        whole = "{%" in e or "{{" in e or "{#" in e or e.startswith(("\n", "a\r"))
        expressions.append([e if whole else "{{ " + e + " }}", None])
        expressions[-1][1] = render(expressions[-1][0], **X)
    golden = {"templates": TEMPLATES, "conversations": CONVERSATIONS, "options": OPTIONS, "variables": X,
              "cases": cases, "expressions": expressions}
    # One row per line: differences can be read.
    rows = [f' "{key}": ' + ("[\n" + ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in value) + "\n ]"
                            if isinstance(value, list) else json.dumps(value, ensure_ascii=False)) for key, value in golden.items()]
    sys.stdout.write("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    main()
